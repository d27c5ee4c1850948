"""A run with the vLLM engine goes on from a checkpoint but for last digits; vLLM loads its policy folder as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppo_core.main import run_segment
from ppo_core.rundir import ExitCode, SegmentDir
from tests.ppo_core.rollout.test_vllm_run import vllm_spec
from tests.ppo_core.toy_run import journal, toy_segment

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

IDS = [1, 20, 33, 47, 60, 75, 90, 120]
# The model's own weights, read by vLLM itself; nothing is synced into it.
LOADS = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4,
          kv_cache_memory_bytes=2**26, disable_log_stats=True)
asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
(found,) = llm.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], asked, use_tqdm=False)
said = [list(each.values())[0].logprob for each in found.prompt_logprobs[1:]]
open(sys.argv[3], "w").write(json.dumps(said))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[SegmentDir, SegmentDir]:
    """Four iterations straight, and the last two again from the checkpoint of the second, by another engine."""
    folder = tmp_path_factory.mktemp("vllm")
    spec: dict[str, Any] = {**vllm_spec(folder, 4), "checkpoints": {"every": 2}, "samples": {"per_iteration": 8}}
    straight = toy_segment(folder / "run", spec)
    assert run_segment(straight, token=0, attempt=1) == ExitCode.DONE
    again = toy_segment(folder / "run", spec, 2, str(straight.checkpoint(2)))
    assert run_segment(again, token=0, attempt=2) == ExitCode.DONE
    return straight, again


def samples_of(segment: SegmentDir, iteration: int) -> list[dict[str, Any]]:
    lines = (segment.samples / f"iter-{iteration:06d}-train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_goes_on_with_the_same_prompts_and_but_for_last_digits_the_same_numbers(
    runs: tuple[SegmentDir, SegmentDir],
) -> None:
    """A response may differ after a near tie of two tokens; of the first iteration after the checkpoint most do not."""
    straight, again = (samples_of(segment, 3) for segment in runs)
    assert [row["prompt"] for row in straight] == [row["prompt"] for row in again]
    same = [(a, b) for a, b in zip(straight, again, strict=True) if a["tokens"]["ids"] == b["tokens"]["ids"]]
    assert len(same) >= 6
    for one, other in same:
        assert one["tokens"]["logprobs"] == pytest.approx(other["tokens"]["logprobs"], abs=1e-4)
        assert one["score"] == pytest.approx(other["score"], abs=1e-4)
    for segment in runs:
        told = [event.payload for event in journal(segment, "metrics") if event.iteration == 3]
        assert told[-1]["rollout/engine_gap_max"] < 1e-4


def test_vllm_loads_the_policy_folder_of_a_checkpoint_as_it_is(
    runs: tuple[SegmentDir, SegmentDir], tmp_path: Path
) -> None:
    """Its logprobs are those of plain transformers from the same folder."""
    folder = runs[0].checkpoint(4) / "policy"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(folder), json.dumps(IDS), str(tmp_path / "said")],
        env={**environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = torch.tensor(json.loads((tmp_path / "said").read_text()))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logprobs = model(torch.tensor([IDS])).logits.log_softmax(-1)[0]
    own = logprobs[:-1].gather(1, torch.tensor(IDS[1:])[:, None]).squeeze(1)
    assert torch.allclose(said, own, atol=1e-4)
