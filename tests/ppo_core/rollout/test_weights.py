"""What travels in a sync: names, ties, layers; digests that see every bit; the probe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.weights import PolicyWeights, probe_of, weights_digest
from tests.ppo_core.tiny_models import FAMILIES, tiny_model


def test_weights_are_made_whole_a_layer_at_a_time() -> None:
    """Gathering a whole partitioned model at once is what runs out of memory (huggingface/trl#2557)."""
    policy = PolicyModel(tiny_model())
    whole: set[int] = set()
    most = 0

    @contextmanager
    def gather(parameters: list[nn.Parameter]) -> Iterator[None]:
        nonlocal most
        assert not whole, "one layer is given back before the next one is made whole"
        whole.update(id(parameter) for parameter in parameters)
        most = max(most, sum(parameter.numel() for parameter in parameters))
        yield
        whole.clear()

    own = {parameter.data_ptr(): id(parameter) for parameter in policy.model.parameters()}
    for _, tensor in PolicyWeights(policy, gather):
        assert own[tensor.data_ptr()] in whole
    assert not whole
    assert most < 0.5 * sum(parameter.numel() for parameter in policy.model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_the_checkpoints_names_tied_ones_once_and_no_value_head(family: str) -> None:
    policy = PolicyModel(tiny_model(family))
    names = [name for name, _ in PolicyWeights(policy)]
    assert len(names) == len(set(names))
    assert set(names) == {name for name, _ in policy.model.named_parameters()}


def test_a_digest_sees_every_bit_name_and_shape_but_no_order() -> None:
    pairs = [("a", torch.zeros(2, 3)), ("b", torch.ones(4))]
    digest = weights_digest(pairs)
    assert digest == weights_digest(reversed(pairs))
    flipped = torch.zeros(2, 3)
    flipped.view(torch.int32)[1, 2] = 1
    others = [
        [("a", flipped), pairs[1]],
        [("c", pairs[0][1]), pairs[1]],
        [("a", torch.zeros(3, 2)), pairs[1]],
        [("a", torch.zeros(2, 3, dtype=torch.int32)), pairs[1]],
        [("a", pairs[1][1]), ("b", pairs[0][1])],
        pairs[:1],
    ]
    assert len({digest, *(weights_digest(other) for other in others)}) == len(others) + 1


def test_the_probe_moves_with_the_weights_and_nan_is_no_agreement() -> None:
    policy = PolicyModel(tiny_model())
    probe = probe_of(policy)
    assert probe.gap(probe_of(policy).logprobs) == 0
    with torch.no_grad():
        next(policy.model.parameters()).mul_(1.5)
    assert probe.gap(probe_of(policy).logprobs) > 0.01
    assert probe.gap(torch.full_like(probe.logprobs, torch.nan)) == torch.inf
