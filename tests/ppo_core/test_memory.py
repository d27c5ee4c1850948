"""Estimated bytes against those that real runs hold: states of 300 MB and more, every phase, and the peak."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_core.estimate import estimate
from ppo_core.memory import PROGRAM_BYTES, MemoryEstimate
from ppo_core.spec import parse_spec
from tests.ppo_core.rank_processes import exit_codes, start_ranks
from tests.ppo_core.tensor_memory import peaks_of_run
from tests.ppo_core.tiny_models import tiny_model
from tests.ppo_core.toy_run import TOKENS, make_toy, toy_segment

# 17.9 million parameters: enough for 300 MB of states, and for runs of seconds.
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "max_position_embeddings": 512,
}
# Which phases of a journal belong to one of the estimate.
PHASES = {
    "loading": ("loading",),
    "rollout": ("rollout", "scoring", "evaluation"),
    "logprobs": ("logprobs",),
    "update": ("update",),
    "saving": ("sync", "saving"),
}
RUNS: dict[str, dict[str, Any]] = {
    "bfloat16": {"policy": {"dtype": "bfloat16"}, "rollout": {"batch_size": 4, "max_new_tokens": 4}},
    "separate critic": {"policy": {"value_head": "separate"}},
    "float32, several microbatches": {"update": {"token_budget": 80}},
    "float32, large vocabulary": {"vocabulary": 8000, "rollout": {"max_new_tokens": 24}, "update": {"minibatches": 1}},
}


# The same on two ranks: what is shared out, and what every rank has whole.
RANKS: dict[str, dict[str, Any]] = {
    "ZeRO 2, float32": {"training": {"engine": "deepspeed", "ranks": 2, "zero_stage": 2}},
    "ZeRO 3, bfloat16": {
        "training": {"engine": "deepspeed", "ranks": 2, "zero_stage": 3},
        **RUNS["bfloat16"],
    },
}


def run_of(folder: Path, vocabulary: int = TOKENS, **groups: Any) -> dict[str, Any]:
    """A raw spec of two iterations with a policy of SIZES."""
    raw = {
        **make_toy(folder),
        "iterations": 2,
        "evaluation": {"every": 2, "prompts": 4},
        "checkpoints": {"every": 2},
    }
    raw["data"]["max_prompt_tokens"] = 24
    for name, group in groups.items():
        raw[name] = {**raw.get(name, {}), **group}
    dtype = getattr(torch, raw["policy"].get("dtype", "float32"))
    policy = tiny_model("llama", vocab_size=vocabulary, initializer_range=0.02, **SIZES)
    policy.to(dtype).save_pretrained(folder / "policy")
    return raw


def measured_and_estimated(
    raw: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, int], MemoryEstimate]:
    gc.collect()
    peaks = peaks_of_run(toy_segment(folder / "run", raw), monkeypatch)
    memory = estimate(parse_spec(raw)).memory
    assert memory is not None
    return {phase: max(peaks[part] for part in parts) for phase, parts in PHASES.items()}, memory


@pytest.mark.runs
@pytest.mark.parametrize("name", RUNS)
def test_memory_is_what_a_real_run_holds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each phase within a quarter, and the fullest, which decides whether a run fits, within a tenth."""
    measured, memory = measured_and_estimated(run_of(tmp_path, **RUNS[name]), tmp_path, monkeypatch)
    assert memory.states_bytes > 300e6
    assert memory.phases == pytest.approx(measured, rel=0.25)
    assert memory.peak_bytes - PROGRAM_BYTES == pytest.approx(max(measured.values()), rel=0.1)


@pytest.mark.engines
@pytest.mark.parametrize("name", RANKS)
def test_memory_is_what_each_of_two_ranks_holds(name: str, tmp_path: Path) -> None:
    raw = run_of(tmp_path, **RANKS[name])
    segment, result, log = toy_segment(tmp_path / "run", raw), tmp_path / "peaks", tmp_path / "log"
    processes = start_ranks(2, "-m", "tests.ppo_core.measured_rank", str(segment.path), str(result), log=log)
    codes = exit_codes(processes, 280)
    assert codes == [0, 0], log.with_name("log-0.log").read_text()[-3000:]
    first, second = (json.loads(Path(f"{result}-{rank}.json").read_text()) for rank in range(2))
    measured = {phase: max(first[part] for part in parts) for phase, parts in PHASES.items()}
    memory = estimate(parse_spec(raw)).memory
    assert memory is not None
    peak = memory.peak_bytes - PROGRAM_BYTES
    assert memory.phases == pytest.approx(measured, rel=0.25)
    assert peak == pytest.approx(max(measured.values()), rel=0.1)
    assert peak == pytest.approx(max(second.values()), rel=0.1)


@pytest.mark.runs
def test_adapters_take_most_memory_when_they_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = run_of(tmp_path, policy={"lora": {"rank": 16}})
    measured, memory = measured_and_estimated(raw, tmp_path, monkeypatch)
    assert memory.phases == pytest.approx(measured, rel=0.25)
    assert max(memory.phases, key=lambda phase: memory.phases[phase]) == "saving"
    assert max(measured, key=lambda phase: measured[phase]) == "saving"
