"""Metrics of runs that never were: what bands and stories are tried on, iteration by iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ppo_core.diagnostics.alerts import CheckpointBefore, Payload, Watch
from ppo_core.spec import RunSpec, parse_spec

RAW: dict[str, Any] = {
    "name": "made",
    "iterations": 400,
    "policy": {"model": "policy"},
    "data": {"prompts": "train.jsonl"},
    "reward": {"sources": [{"kind": "python", "name": "score"}]},
}
Metrics = dict[str, float | None]
#: What a run changes of the healthy metrics at an iteration.
Change = Callable[[int], Mapping[str, float | None]]


def made_spec(**groups: Any) -> RunSpec:
    return parse_spec({**RAW, **groups})


def healthy(iteration: int) -> Metrics:
    """A run that learns and is well, with a little noise that is the same every time."""
    noise = ((iteration * 7919) % 13 - 6) / 6  # -1 to 1
    learned = min(1.0, iteration / 100)
    kl = 4 * learned
    return {
        "reward/score_mean": learned + 0.05 * noise,
        "reward/total_mean": 0.8 * learned + 0.05 * noise,
        "reward/length_slope": 0.01 * noise,
        "kl/ref_token": kl / 30,
        "kl/ref_sequence": kl,
        "kl/ref_token_k3": kl / 30,
        "kl/ref_sequence_k3": kl,
        "policy/approx_kl": 0.004 + 0.002 * noise,
        "policy/approx_kl/epoch_1": 0.001,
        "policy/approx_kl/epoch_2": 0.007,
        "policy/clip_fraction": 0.05 + 0.03 * noise,
        "policy/clip_fraction/epoch_1": 0.01,
        "policy/clip_fraction/epoch_2": 0.09,
        "policy/entropy": 3.0 - 0.3 * learned + 0.05 * noise,
        "policy/grad_norm": 1.0 + 0.3 * noise,
        "policy/first_minibatch_ratio_max_dev": 1e-6,
        "policy/log_ratio_clamped": 0.0,
        "value/explained_variance_return": 0.5 * min(1.0, iteration / 30) + 0.1 * noise,
        "value/explained_variance": 0.5 * min(1.0, iteration / 30) + 0.1 * noise,
        "value/mean": learned,
        "value/return_mean": learned + 0.02 * noise,
        "value/grad_norm": 0.5 + 0.2 * noise,
        "value/clip_fraction": 0.1,
        "advantage/std": 0.5,
        "response/length_mean": 30 + 2 * noise,
        "response/length_p95": 45.0,
        "response/eos_rate": 0.97 + 0.02 * noise,
        "response/distinct_2": 0.8 + 0.02 * noise,
        "response/repeat_3": 0.05 + 0.01 * noise,
        "response/identical": 0.0,
        "response/invalid": 0.0,
        "rollout/engine_gap_mean": 1e-6,
        "rollout/engine_gap_max": 1e-5,
        "rollout/rows_at_once": 64.0,
        "optimizer/skipped": 0.0,
        "optimizer/empty_minibatches": 0.0,
        "data/response_tokens": 64.0 * 30,
        "data/prompts_trained": 64.0 * iteration,
    }


def unchanged(iteration: int) -> Metrics:
    return {}


def watch_of(spec: RunSpec, checkpoint_before: CheckpointBefore = lambda iteration: None) -> Watch:
    return Watch(spec, None, checkpoint_before)


def alerts_of(
    change: Change = unchanged, iterations: int = 200, spec: RunSpec | None = None, watch: Watch | None = None
) -> list[Payload]:
    """All alerts of a made run, in order."""
    watch = watch or watch_of(spec or made_spec())
    found = []
    for iteration in range(1, iterations + 1):
        found += watch.look(iteration, {**healthy(iteration), **change(iteration)})
    return found
