"""The metric registry: complete, consistent and in the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ppo_core.registry import METRICS, PANELS, Metric, as_json, metric
from ppo_core.registry.page import page

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONTRACT = """
reward/{score_mean,score_std,penalized_mean,total_mean} kl/{ref_token,ref_sequence,ref_token_k3,ref_sequence_k3,coef}
policy/{loss,approx_kl,clip_fraction,clip_fraction_active,ratio_mean,ratio_max,first_minibatch_ratio}
policy/{first_minibatch_ratio_max_dev,first_minibatch_clip_fraction,entropy,grad_norm}
policy/approx_kl/{epoch_1,epoch_12} policy/clip_fraction/{epoch_1,epoch_12}
value/{loss,clip_fraction,explained_variance,explained_variance_return,grad_norm} advantage/{mean,std}
response/{length_mean,length_p50,length_p95,eos_rate,distinct_2,repeat_3,identical,empty,invalid}
rollout/{engine_gap_mean,engine_gap_max,policy_version} heldout/{score_mean}
judge/{win_rate,win_rate_vs_start,score_mean} optimizer/{learning_rate,steps,skipped}
data/{prompts_trained,prompts_filtered,prompts_failed}
time/{rollout_s,score_s,logprobs_s,update_s,sync_s,iteration_s}
throughput/{response_tokens_per_s,trained_tokens_per_s} memory/{peak_gib} limit/{fraction}
"""
CONTRACT_NAMES = [
    prefix + name for prefix, names in re.findall(r"([\w/]+/)\{([\w,]+)\}", CONTRACT) for name in names.split(",")
]


@pytest.mark.parametrize("name", CONTRACT_NAMES)
def test_every_name_that_others_rely_on_is_there(name: str) -> None:
    assert metric(name).title


@pytest.mark.parametrize(
    "name", ["reward/scores", "policy/approx_kl/", "policy/approx_kl/epoch_", "", "policy/approx_kl/epoch_*/x"]
)
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(KeyError, match="no metric"):
        metric(name)


@pytest.mark.parametrize("entry", METRICS.values(), ids=lambda entry: entry.name)
def test_every_metric_is_said_whole(entry: Metric) -> None:
    assert re.fullmatch(r"[a-z]+(/[a-z0-9_]+)+(/\*|_\*)?", entry.name.replace("/*", "/x"))
    assert entry.panel in PANELS
    for sentence in (entry.formula, entry.meaning, entry.remedy):
        assert sentence.endswith((".", "?"))
    assert entry.title
    assert entry.unit
    assert entry.weighting


@pytest.mark.parametrize("entry", METRICS.values(), ids=lambda entry: entry.name)
def test_bands_are_ordered(entry: Metric) -> None:
    """Red begins no nearer than the healthy range ends, and the healthy range can be reached."""
    band = entry.band
    if band is None:
        return
    ordered = [b for b in (band.red_low, band.low, band.high, band.red_high) if b is not None]
    assert ordered
    assert ordered == sorted(ordered)
    assert (band.measure == "value") == (band.relative_to is None)
    if band.relative_to is None and entry.legal is not None:
        low, high = entry.legal
        assert all((low is None or b >= low) and (high is None or b <= high) for b in ordered if b != band.red_low)


@pytest.mark.parametrize("entry", METRICS.values(), ids=lambda entry: entry.name)
def test_metrics_and_fields_that_a_text_names_exist(entry: Metric) -> None:
    from ppo_core.spec import RunSpec

    text = f"{entry.formula} {entry.meaning} {entry.remedy}"
    for name in re.findall(r"\b[a-z]+/[a-z][a-z0-9_]*(?:/\*)?", text):
        assert name in METRICS, name
    for group, field in re.findall(r"\b([a-z]+)\.([a-z_]+)", text):
        annotation = RunSpec.model_fields[group].annotation
        assert field in getattr(annotation, "model_fields", ()), f"{group}.{field}"


def test_the_registry_is_strict_json() -> None:
    entries = json.loads(json.dumps(as_json(), allow_nan=False))
    assert {entry["name"] for entry in entries} == set(METRICS)
    assert [entry["panel"] for entry in entries] == sorted(
        (entry["panel"] for entry in entries), key=list(PANELS).index
    )


def test_no_name_is_given_twice() -> None:
    from ppo_core.registry import evaluation, generation, kl, policy, reward, system, value

    names = [m.name for panel in (evaluation, generation, kl, policy, reward, system, value) for m in panel.METRICS]
    assert len(names) == len(set(names))


def test_docs_are_what_the_registry_says() -> None:
    assert (DOCS / "metrics.md").read_text(encoding="utf-8") == page(), (
        "run `python -m ppo_core.registry > docs/metrics.md`"
    )


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_stands_in_the_docs(name: str) -> None:
    assert f"### `{name}`" in (DOCS / "metrics.md").read_text(encoding="utf-8")
