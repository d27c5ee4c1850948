"""Logprobs over the tokens that could be drawn: T08's numbers, single tokens, gradients, chunks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ppo_core.errors import ShapeError
from ppo_core.models import logits_head
from ppo_core.models.logits_head import LogitsHead
from ppo_core.models.token_sets import Listed, TokenSets, joined
from ppo_core.rewards import kl_penalty


def sets(*ids: list[int], listed: Listed = "drawable") -> TokenSets:
    flat = [token for one in ids for token in one]
    return TokenSets(torch.tensor(flat, dtype=torch.int32), torch.tensor([len(one) for one in ids]), listed)


def head(probabilities: list[float]) -> LogitsHead:
    """A head whose distribution is the given one, whatever the state."""
    output = nn.Linear(1, len(probabilities))
    nn.init.zeros_(output.weight)
    output.bias.data = torch.tensor(probabilities).log()
    return LogitsHead(SimpleNamespace(get_output_embeddings=lambda: output))


def logprobs_of(made: LogitsHead, tokens: list[int], token_sets: TokenSets | None) -> Tensor:
    found, _ = made.logprobs(torch.zeros(len(tokens), 1), torch.tensor(tokens), 1.0, "none", token_sets)
    return found.detach()


@pytest.mark.parametrize("token_sets", [sets([0], [0], listed="forbidden"), sets([1, 2], [1, 2])])
def test_a_forbidden_end_gives_the_true_kl(token_sets: TokenSets) -> None:
    """T08: policy .5 .3 .2, reference .3 .4 .3, id 0 forbidden: KL +0.0017; over all tokens it would be -0.335."""
    policy, reference = head([0.5, 0.3, 0.2]), head([0.3, 0.4, 0.3])
    drawn = torch.tensor([0.6, 0.4])  # how often ids 1 and 2 are sampled
    right = kl_penalty(logprobs_of(policy, [1, 2], token_sets), logprobs_of(reference, [1, 2], token_sets))
    wrong = kl_penalty(logprobs_of(policy, [1, 2], None), logprobs_of(reference, [1, 2], None))
    assert float((drawn * right).sum()) == pytest.approx(0.0017, abs=5e-5)
    assert float((drawn * wrong).sum()) == pytest.approx(-0.335, abs=5e-4)


def test_a_set_of_one_token_has_logprob_and_entropy_zero_and_a_finite_gradient() -> None:
    made = head([0.5, 0.3, 0.2])
    states = torch.zeros(2, 1, requires_grad=True)
    found, entropies = made.logprobs(states, torch.tensor([1, 2]), 0.7, "trained", sets([1], [0, 2]))
    assert entropies is not None
    assert found[0] == entropies[0] == 0
    (found.sum() + entropies.sum()).backward()
    gradient = made.model.get_output_embeddings().bias.grad
    assert bool(gradient.isfinite().all())
    assert gradient[1] == 0  # It could not be drawn at the second place, and nothing else at the first.


def test_entropy_is_that_of_the_drawable_tokens() -> None:
    _, entropies = head([0.5, 0.25, 0.25]).logprobs(
        torch.zeros(1, 1), torch.tensor([1]), 1.0, "measured", sets([0], listed="forbidden")
    )
    torch.testing.assert_close(entropies, torch.tensor([0.5]).log().neg())


@pytest.mark.parametrize("listed", ["drawable", "forbidden"])
def test_chunks_take_their_own_sets(listed: Listed, monkeypatch: pytest.MonkeyPatch) -> None:
    made = head([0.1, 0.2, 0.3, 0.4])
    if listed == "drawable":
        several, tokens = sets([1, 2], [3], [0], [0, 3], [2]), [1, 3, 0, 3, 2]
    else:
        several, tokens = sets([1, 2], [3], [], [0, 3], [2], listed="forbidden"), [0, 0, 0, 1, 1]
    whole = logprobs_of(made, tokens, several)
    monkeypatch.setattr(logits_head, "head_positions", lambda vocabulary: 2)
    assert torch.equal(logprobs_of(made, tokens, several), whole)


def test_joined_rows_are_one_sequence() -> None:
    both = joined([sets([1, 2], [3]), sets([0])])
    assert (both.ids.tolist(), both.counts.tolist(), both.listed) == ([1, 2, 3, 0], [2, 1, 1], "drawable")


def test_sets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="1 token sets do not fit 2 tokens"):
        logprobs_of(head([0.5, 0.5]), [0, 1], sets([0]))
