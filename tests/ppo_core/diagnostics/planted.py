"""A toy run that is healthy, and faults to plant in it: what the diagnoses are tried on.

The reward is for vowels in the response. Faults are put in from outside, by the settings of the run or
in the loaded trainer; whatever judges them sees the journal alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ppo_core.iteration
from ppo_core.rollout.engine import Response, SyncReport
from ppo_core.rollout.transformers_engine import TransformersEngine
from ppo_core.rollout.weights import weights_digest
from ppo_core.scoring.combine import Reward
from tests.ppo_core.toy_run import make_toy

LETTERS = "aeiou"
Change = Callable[[Any], None]


class Vowels:
    """Scores 2 for a response with a vowel in it: a policy gets it without becoming poorer."""

    def score(self, prompts: Sequence[str], responses: Sequence[str], check: object = None) -> list[object]:
        return [2.0 * any(letter in text for letter in LETTERS) for text in responses]

    def close(self) -> None:
        """Nothing to end."""


class AnyLetter(Vowels):
    """Scores 2 for a response with a letter in it. Most have one from the start: few gain by being longer, or alike."""

    def score(self, prompts: Sequence[str], responses: Sequence[str], check: object = None) -> list[object]:
        return [2.0 * any(letter.isascii() and letter.isalpha() for letter in text) for text in responses]


class ShareOfVowels(Vowels):
    """Scores the share of vowels in a response: one vowel alone is worth most."""

    def score(self, prompts: Sequence[str], responses: Sequence[str], check: object = None) -> list[object]:
        return [4.0 * sum(map(text.count, LETTERS)) / max(1, len(text)) for text in responses]


class Lengths(Vowels):
    """Scores a tenth a letter."""

    def score(self, prompts: Sequence[str], responses: Sequence[str], check: object = None) -> list[object]:
        return [0.1 * len(text) for text in responses]


@dataclass(frozen=True)
class Planted:
    """A fault: settings of the spec's groups, and what is done to the loaded trainer."""

    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    change: Change = lambda trainer: None
    reward: Vowels = field(default_factory=Vowels)


def keyword_spec(folder: Path, seed: int, iterations: int, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The healthy toy's spec, with the groups of `settings` changed."""
    spec = make_toy(folder, num_prompts=96)
    groups: dict[str, dict[str, Any]] = {
        "policy": {"value_head": "separate"},
        "data": {},
        "rollout": {"batch_size": 32, "max_new_tokens": 16, "stop_ids": list(range(3, 50))},
        "reward": {"missing_eos_penalty": -0.5},
        "kl": {"coef": 0.2},
        "update": {
            "learning_rate": 2e-3,
            "value_learning_rate": 1e-2,
            "minibatches": 2,
            "critic_warmup_iterations": 3,
        },
        "gate": {"every": 1000},
        "evaluation": {"every": 1000},
        "checkpoints": {"every": 1000},
        "samples": {"every": 1000},
    }
    del spec["data"]["held_out"]
    for name in {*groups, *settings}:
        spec[name] = {**spec.get(name, {}), **groups.get(name, {}), **settings.get(name, {})}
    return spec | {"seed": seed, "iterations": iterations}


def plant(planted: Planted) -> Change:
    """What is done to a loaded trainer: its reward, and the fault. It stays in the process that it was done in."""

    def change(trainer: Any) -> None:
        trainer.models = replace(trainer.models, reward=Reward(((planted.reward, 1.0),), 0.1))
        planted.change(trainer)

    return change


def out_of_memory_from(iteration: int, rows: int) -> Change:
    """From an iteration on no more than so many rows are generated at once."""

    def change(trainer: Any) -> None:
        engine = trainer.models.engine
        generate = engine._generate

        def crowded(prompt_ids: list[list[int]], *more: Any) -> list[Response]:
            if trainer.control.iteration >= iteration and len(prompt_ids) > rows:
                raise torch.OutOfMemoryError
            found: list[Response] = generate(prompt_ids, *more)
            return found

        engine._generate = crowded

    return change


def dead_critic(trainer: Any) -> None:
    """No gradient of the value loss ever reaches the critic."""
    backward = trainer.models.trainer.backward
    trainer.models.trainer.backward = lambda policy, value: backward(policy, value * 0)


def off_by_one(trainer: Any) -> None:
    """Every pass over policy and reference gives each token its neighbour's logprob."""

    def shifted(logprobs: Tensor) -> Tensor:
        return torch.roll(logprobs, 1, dims=1)

    engine, reference = trainer.models.trainer, trainer.models.reference
    forward, of_reference = engine.forward, reference.logprobs

    def forward_shifted(batch: Any, **more: Any) -> Any:
        output = forward(batch, **more)
        return replace(output, logprobs=shifted(output.logprobs))

    engine.forward = forward_shifted
    reference.logprobs = lambda *batch, **more: shifted(of_reference(*batch, **more))


def engine_logprobs(trainer: Any) -> None:
    """What the engine says of its tokens is taken for the old logprobs."""
    forward = ppo_core.iteration.forward_policy

    def of_engine(engine: Any, rollout: Any, *more: Any) -> Any:
        return replace(forward(engine, rollout, *more), logprobs=rollout.engine_logprobs)

    ppo_core.iteration.forward_policy = of_engine


class _StaleEngine(TransformersEngine):
    """Says that it took the weights, and keeps its own."""

    def sync_weights(self, weights: Any, probe: Any, version: int) -> SyncReport:
        self._version = version
        return SyncReport(version, weights_digest(weights), 0.0)


def stale_weights(trainer: Any) -> None:
    policy = copy.deepcopy(trainer.models.trainer.policy)
    engine = _StaleEngine(policy, trainer.tokenizer, trainer.spec.rollout)
    trainer.models = replace(trainer.models, engine=engine)


def padding_in_means(trainer: Any) -> None:
    """The mean of a per-token tensor is over its padding, too."""
    import ppo_core.diagnostics.iteration_metrics as made

    def padded(x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, x, 0.0).double().mean()

    made.masked_mean = padded


def cut_off_from(iteration: int) -> Change:
    def change(trainer: Any) -> None:
        generate = trainer.models.engine.generate

        def cut(*arguments: Any, **more: Any) -> list[Response]:
            found: list[Response] = generate(*arguments, **more)
            if trainer.control.iteration < iteration:
                return found
            return [
                Response(each.ids[:3], "length", each.logprobs[:3]) if len(each.ids) > 3 else each for each in found
            ]

        trainer.models.engine.generate = cut

    return change


HEALTHY = Planted({"rollout": {"batch_size": 64}}, reward=AnyLetter())
FAULTS: dict[str, Planted] = {
    "healthy": HEALTHY,
    "critic_not_learning": Planted(change=dead_critic),
    "too_many_epochs": Planted({"update": {"epochs": 12, "learning_rate": 4e-3}}),
    "off_by_one": Planted(change=off_by_one),
    "engine_logprobs": Planted(change=engine_logprobs),
    "weights_out_of_sync": Planted(change=stale_weights),
    "padding_in_averages": Planted(change=padding_in_means),
    "length_hacking": Planted(
        {
            "kl": {"coef": 0.01},
            "reward": {"missing_eos_penalty": 0.0},
            "rollout": {"max_new_tokens": 32},
            "update": {"learning_rate": 5e-3},
        },
        reward=Lengths(),
    ),
    "reward_hacking": Planted({"kl": {"coef": 0.0}, "update": {"learning_rate": 5e-3}}, reward=ShareOfVowels()),
    "generation_cut_off": Planted(change=cut_off_from(25)),
    "out_of_memory_in_generation": Planted(change=out_of_memory_from(25, rows=20)),
}
