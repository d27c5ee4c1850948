"""The signs are right: whole runs of a toy policy learn what is rewarded, obey the KL penalty, and value what they get.

The reward is the share of a few letters in the response, so what is to be learned are a few ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ppo_core.trainer
from ppo_core.iteration import IterationReport
from ppo_core.main import run_segment
from ppo_core.masked import masked_mean
from ppo_core.rewards import kl_penalty
from ppo_core.rundir import ExitCode
from ppo_core.scoring.combine import Reward
from tests.ppo_core.toy_run import make_toy, toy_segment
from tests.ppo_core.training.engine_state import whole_state

pytestmark = pytest.mark.runs

LETTERS = "aeiou"
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "separate critic": {"value_head": "separate"},
    "adapters": {"lora": {"rank": 8, "alpha": 64}},
    "bfloat16": {"dtype": "bfloat16"},
}


class Share:
    """Scores the share of the letters in a response, times `weight`, plus `base`."""

    def __init__(self, weight: float, base: float = 0.0) -> None:
        self.weight, self.base = weight, base

    def score(self, prompts: Sequence[str], responses: Sequence[str], check: object = None) -> list[object]:
        return [self.base + self.weight * sum(map(text.count, LETTERS)) / max(1, len(text)) for text in responses]

    def close(self) -> None:
        """Nothing to end."""


class Run:
    """One run of the toy with its records: reports of all iterations, and the policy before and after."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        scorer: Share,
        policy: dict[str, Any],
        before: Callable[[Any], None] = lambda trainer: None,
        iterations: int = 12,
        **groups: dict[str, Any],
    ) -> None:
        spec = {**make_toy(folder, num_prompts=64), "iterations": iterations}
        spec["data"] = {key: value for key, value in spec["data"].items() if key != "held_out"}
        common: dict[str, dict[str, Any]] = {
            "rollout": {"batch_size": 64, "max_new_tokens": 6},
            "reward": {"missing_eos_penalty": 0.0},
            "kl": {"coef": 0.0},
            "update": {"learning_rate": 5e-3, "value_learning_rate": 2e-2, "value_clip_range": None, "minibatches": 2},
            "policy": policy,
            "checkpoints": {"every": 100},
        }
        for name in {*common, *groups}:
            spec[name] = {**spec.get(name, {}), **common.get(name, {}), **groups.get(name, {})}
        self.reports: list[IterationReport] = []
        iterate = ppo_core.trainer.run_iteration

        def recorded(*args: Any) -> IterationReport:
            self.reports.append(iterate(*args))
            return self.reports[-1]

        def change(trainer: Any) -> None:
            trainer.models = replace(trainer.models, reward=Reward(((scorer, 1.0),), 0.1))
            before(trainer)
            self.trainer = trainer
            self.start = self.probe()
            self.start_state = {name: tensor.clone() for name, tensor in whole_state(trainer.models.trainer).items()}

        if policy.get("lora"):
            spec["update"]["learning_rate"] = 2e-2  # adapters start as a product with zero, and move slowly at first
        monkeypatch.setattr(ppo_core.trainer, "run_iteration", recorded)
        self.code = run_segment(toy_segment(folder / "run", spec), 0, 1, change=change)

    @torch.no_grad()
    def probe(self) -> Tensor:
        """Distributions [9, V] after nine of the prompts."""
        model = self.trainer.models.trainer.policy.model
        batch = self.trainer.prompts.first(9)
        return torch.stack([model(torch.tensor([ids])).logits[0, -1].float().softmax(-1) for ids in batch.prompt_ids])

    def letter_probability(self, probe: Tensor) -> float:
        tokens = self.trainer.tokenizer.convert_tokens_to_ids(list(LETTERS))
        return float(probe[:, tokens].sum() / len(probe))

    def value_errors(self) -> list[float]:
        """Mean squared error of the values of each iteration's fresh responses, before they were trained on."""
        return [
            float(masked_mean((each.old.values - each.returns).square(), each.rollout.response_mask))
            for each in self.reports
        ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rewarded_id_becomes_likelier_and_values_come_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    run = Run(tmp_path, monkeypatch, Share(4.0, base=1.0), VARIANTS[variant], iterations=20)
    assert run.code == ExitCode.DONE
    before, after = run.letter_probability(run.start), run.letter_probability(run.probe())
    assert after > 2 * before
    # The baseline of a value head that knows nothing: the returns themselves.
    last = run.reports[-1]
    unlearned = float(masked_mean(last.returns.square(), last.rollout.response_mask))
    assert run.value_errors()[-1] < 0.5 * unlearned


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_punished_id_becomes_rarer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    run = Run(tmp_path, monkeypatch, Share(-4.0), VARIANTS[variant], iterations=20)
    assert run.code == ExitCode.DONE
    assert run.letter_probability(run.probe()) < run.letter_probability(run.start)


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_kl_penalty_brings_the_policy_back_to_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    def away(trainer: Any) -> None:
        """Move what is trained by noise of its own, masters included."""
        engine, noise = trainer.models.trainer, torch.Generator().manual_seed(4)
        state = whole_state(engine)
        # Adapters start as a product with zero: noise in the other factor alone would be none.
        scale = 0.8 if VARIANTS[variant].get("lora") else 0.1
        moved = {
            name: tensor + scale * torch.randn(tensor.shape, generator=noise)
            if name.startswith("master/model")
            else tensor
            for name, tensor in state.items()
        }
        engine.load_state(moved, 0)

    run = Run(tmp_path, monkeypatch, Share(0.0), VARIANTS[variant], away, iterations=20, kl={"coef": 1.0})
    assert run.code == ExitCode.DONE
    kl = [
        float(masked_mean(kl_penalty(each.old.logprobs, each.ref_logprobs, "k3"), each.rollout.response_mask))
        for each in run.reports
    ]
    assert kl[0] > 0.03
    assert sum(kl[-5:]) < 0.85 * sum(kl[:5])


@pytest.mark.parametrize("value_head", ["shared", "shared_detached", "separate"])
def test_in_critic_warm_up_only_values_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value_head: str) -> None:
    run = Run(
        tmp_path,
        monkeypatch,
        Share(4.0, base=2.0),
        {"value_head": value_head},
        update={"critic_warmup_iterations": 12, "minibatches": 4},
    )
    assert run.code == ExitCode.DONE
    assert torch.equal(run.probe(), run.start)
    end = whole_state(run.trainer.models.trainer)
    ours = {name for name in end if not name.split("/")[1].startswith(("value_head.", "critic."))}
    # No moment of a policy weight has come into being, and no weight has moved.
    assert ours == {name for name in run.start_state if not name.split("/")[1].startswith(("value_head.", "critic."))}
    assert all(torch.equal(end[name], run.start_state[name]) for name in ours)
    errors = run.value_errors()
    assert errors[-1] < 0.5 * errors[0]
