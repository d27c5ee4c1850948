"""The script that needs a GPU, where there is none: what it makes of runs that kept their promises, and of others."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as script
from bench.gpu.case import Case, spec_of, write_case
from bench.gpu.measured import measure
from bench.gpu.observations import GIB, Observations, Sleep, Sync
from bench.gpu.promises import LIMIT_S, in_time, promises_of
from ppo_core.rundir import SegmentStart, create_segment
from ppo_core.spec import parse_spec
from tests.bench.told_run import TOLD

ABOUT = {"device": "none", "torch": "2"}
# Heads of 32 dimensions, as vLLM's attention on a processor wants them.
TINY = Case(64, 96, 2, 2, 1, 300, batch_size=8, max_new_tokens=8, token_budget=256, iterations=2)
METRICS: dict[str, float | None] = {
    "time/iteration_s": 2.0,
    "time/rollout_s": 1.0,
    "policy/first_minibatch_ratio_max_dev": 0.001,
    "rollout/engine_gap_mean": 0.003,
    "rollout/engine_gap_max": 0.05,
    "rollout/engine_gap_k3": 0.0001,
    "optimizer/skipped": 0.0,
    "memory/peak_gib": 12.0,
}


def kept(**changes: Any) -> Observations:
    """A run as it should be, but for the changes."""
    seen = Observations(
        engine="local",
        num_iterations=2,
        exit_code=0,
        transfer="ipc",
        share_bytes=40 * GIB,
        metrics=[METRICS, {**METRICS, "time/rollout_s": 0.5}],
        syncs=[Sync(1, "aa", 0.01, 1.0), Sync(2, "bb", 0.02, 1.0)],
        sleeps=[Sleep(60 * GIB, 95 * GIB, 0.5), Sleep(60 * GIB, 95 * GIB, 0.5)],
        trainer_digest="bb",
        loading_s=60.0,
        peak_gib=12.0,
    )
    return replace(seen, **changes)


def with_metric(name: str, value: float | None) -> Observations:
    """In the second iteration."""
    return kept(metrics=[METRICS, {**METRICS, name: value}])


# A run that breaks one promise, which one it is, and the number that must be told.
BROKEN: dict[str, tuple[Observations, str, str]] = {
    "end": (kept(error="weight_sync: sent aa"), "the run reaches its end", "weight_sync: sent aa"),
    "code": (kept(exit_code=30), "the run reaches its end", "exit code 30"),
    "iterations": (
        with_metric("time/iteration_s", None),
        "iterations with metrics",
        "1",
    ),
    "transfer": (kept(transfer="ppo_shared_memory"), "weights come by CUDA IPC", "ppo_shared_memory"),
    "version": (
        kept(syncs=[Sync(1, "aa", 0.01, 1.0), Sync(1, "bb", 0.01, 1.0)]),
        "versions that were synced and verified",
        "[1, 1]",
    ),
    "unmoved": (
        kept(syncs=[Sync(1, "bb", 0.01, 1.0), Sync(2, "bb", 0.01, 1.0)]),
        "digests that differ from each other",
        "1",
    ),
    "digest": (kept(trainer_digest="cc"), "digest of the last sync is that of the trainer's weights", "bb"),
    "probe": (
        kept(syncs=[Sync(1, "aa", 0.01, 1.0), Sync(2, "bb", 0.11, 1.0)]),
        "probe gap after a sync, nats",
        "0.11",
    ),
    "memory": (
        kept(sleeps=[Sleep(60 * GIB, 95 * GIB, 0.5), Sleep(60 * GIB, 80 * GIB, 0.5)]),
        "share of its 40.0 GiB that the engine gives back asleep",
        "0.5",
    ),
    "sleepless": (
        kept(sleeps=[Sleep(60 * GIB, 95 * GIB, 0.5)]),
        "share of its 40.0 GiB that the engine gives back asleep",
        "0.875",
    ),
    "ratio": (
        with_metric("policy/first_minibatch_ratio_max_dev", 0.0051),
        "max |ratio - 1| before the first step",
        "0.0051",
    ),
    "nan": (with_metric("policy/first_minibatch_ratio_max_dev", math.nan), "max |ratio - 1| before the first step", ""),
    "gap": (with_metric("rollout/engine_gap_mean", 0.03), "engine gap, mean, nats", "0.03"),
    "largest gap": (with_metric("rollout/engine_gap_max", 0.6), "engine gap, max, nats", "0.6"),
    "k3": (with_metric("rollout/engine_gap_k3", 0.003), "engine gap, k3, nats", "0.003"),
    "skipped": (with_metric("optimizer/skipped", 1.0), "optimizer steps skipped", "1"),
    "left": (kept(num_left=1), "engine processes that outlive the run", "1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_the_only_one_and_has_its_number(name: str) -> None:
    seen, text, number = BROKEN[name]
    broken = [promise for promise in promises_of(seen) if not promise.is_kept]
    assert [promise.text for promise in broken] == [text]
    assert number in str(broken[0].found)


def test_every_promise_can_be_broken() -> None:
    assert {text for _, text, _ in BROKEN.values()} == {promise.text for promise in promises_of(kept())}
    assert in_time(LIMIT_S).is_kept
    assert not in_time(LIMIT_S + 1).is_kept


def test_nothing_seen_keeps_no_promise_but_that_nothing_is_left() -> None:
    promises = promises_of(Observations("local", 2, None, "it did not end in time"))
    assert [promise.text for promise in promises if promise.is_kept] == ["engine processes that outlive the run"]


def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Observations | str) -> int:
    if isinstance(told, Observations):
        told.write(tmp_path / "told.json")
    monkeypatch.setenv(TOLD, told if isinstance(told, str) else str(tmp_path / "told.json"))
    return script.run(TINY, tmp_path / "out", ABOUT, "tests.bench.told_run", ["local"])


def test_kept_promises_end_with_zero_and_are_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran(tmp_path, monkeypatch, kept()) == 0
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert "| rollout, s | 0.50 |" in text  # The first iteration warms up.
    assert "| local | max \\|ratio - 1\\| before the first step | 0.001 |" in text
    assert "NO |" not in text
    written = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert written["about"] == ABOUT
    assert written["runs"][0]["syncs"][1]["digest"] == "bb"
    assert all(promise["is_kept"] for promise in written["promises"])


def test_a_broken_promise_ends_with_one_and_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(tmp_path, monkeypatch, BROKEN["ratio"][0]) == 1
    assert (
        "NOT KEPT, local: max |ratio - 1| before the first step: 0.0051, wanted at most 0.005, in each of 2 iterations"
        in capsys.readouterr().err
    )
    assert "| 0.0051 | at most 0.005, in each of 2 iterations | NO |" in (tmp_path / "out" / "gpu.md").read_text()


def test_a_run_that_leaves_no_word_is_a_broken_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(tmp_path, monkeypatch, "die") == 1
    assert "it ended with code 1 and left no word; its last line: out of something" in capsys.readouterr().err


class Card:
    """10 GiB, all of them free."""

    def total_bytes(self) -> int:
        return 10 * GIB

    def free_bytes(self) -> int:
        return 10 * GIB


def test_a_run_that_fails_while_it_loads_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real trainer, which wants the spec's GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_case(TINY, tmp_path)
    segment = create_segment(tmp_path, SegmentStart("gpu-local", 1, spec_of(TINY, tmp_path, "local")))
    seen = measure(segment, Card())
    assert seen.exit_code != 0
    assert "sees no CUDA device" in seen.error
    first = promises_of(seen)[0]
    assert (first.text, first.found, first.is_kept) == ("the run reaches its end", seen.error, False)


def test_a_run_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "LIMIT_S", 0.0)
    began = time.monotonic()
    assert ran(tmp_path, monkeypatch, "hang") == 1
    assert time.monotonic() - began < 60
    assert "it did not end in time" in capsys.readouterr().err


def installed(monkeypatch: pytest.MonkeyPatch, packages: set[str]) -> None:
    """What seems to be, wherever this is run."""
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: object() if name in packages else None)


def test_without_a_gpu_it_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"vllm", "deepspeed"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = script.refusal()
    assert said is not None
    assert "sees no CUDA device: run this on a machine with a GPU" in said
    assert "\n" not in said


@pytest.mark.parametrize("package", ["vllm", "deepspeed"])
def test_without_an_engine_it_says_which_to_install(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    installed(monkeypatch, {"vllm", "deepspeed"} - {package})
    said = script.refusal()
    assert said is not None
    assert said.startswith(f"{package} is not installed here: install the version that requirements/engines.txt names")


@pytest.mark.parametrize("case", [script.DEFAULT, script.SMALL])
@pytest.mark.parametrize("engine", script.ENGINES)
def test_its_specs_are_whole(tmp_path: Path, case: Case, engine: str) -> None:
    spec = parse_spec(spec_of(case, tmp_path, engine))
    assert (spec.training.engine, spec.policy.dtype, spec.resources.gpus) == (engine, "bfloat16", 1)
    assert spec.rollout.engine == "vllm"
    # What trainer and engine share is one card.
    assert spec.rollout.vllm.gpu_memory_utilization < 0.5
