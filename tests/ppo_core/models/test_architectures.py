"""Every supported family, from its folder through one real iteration: the same numbers by every route."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ppo_core.main import run_segment
from ppo_core.models.loading import load_policy
from ppo_core.models.policy import PolicyModel, PolicyOutput
from ppo_core.rollout.transformers_engine import TransformersEngine
from ppo_core.rundir import ExitCode, checkpoints
from ppo_core.spec.groups import PolicyConfig, RolloutConfig
from tests.ppo_core.tiny_models import FAMILIES, VOCABULARY, saved, tiny_model, tiny_tokenizer
from tests.ppo_core.toy_run import TOKENS, journal, make_toy, toy_segment

LENGTH = 9  # Longer than the sliding windows of the tiny models.
TIED = ("llama", "gpt2", "gemma", "gemma2", "gemma3")
# The rates of each family, switched on; what a model's folder may well say.
DROPOUT: dict[str, dict[str, float]] = {
    "gpt2": {"resid_pdrop": 0.3, "attn_pdrop": 0.3, "embd_pdrop": 0.3},
    "gpt_neox": {"attention_dropout": 0.3, "hidden_dropout": 0.3},
    "phi": {"attention_dropout": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3},
}


def policy(family: str) -> PolicyModel:
    """A tiny policy whose value head says something."""
    made = PolicyModel(tiny_model(family))
    assert made.value_head is not None
    nn.init.normal_(made.value_head.weight, generator=torch.Generator().manual_seed(3))
    return made.eval()


def loaded(folder: Path) -> PolicyModel:
    return load_policy(PolicyConfig(model=str(folder)))


def said(made: PolicyModel, rows: list[list[int]], width: int, left: bool) -> PolicyOutput:
    """What the policy says of all tokens of the rows but the first two, padded to `width` on one side by id 7."""
    ids = torch.full((len(rows), width), 7)
    attention = torch.zeros(len(rows), width, dtype=torch.long)
    for row, tokens in enumerate(rows):
        first = width - len(tokens) if left else 0
        ids[row, first : first + len(tokens)] = torch.tensor(tokens)
        attention[row, first : first + len(tokens)] = 1
    mask = (attention.cumsum(1) * attention > 2)[:, 1:]
    return made.predict(ids, attention, mask, temperature=0.7, entropy="measured")


def tokens_of(length: int, shift: int = 0) -> list[int]:
    return [3 + (7 * place + shift) % (VOCABULARY - 3) for place in range(length)]


def first_row(output: PolicyOutput, name: str) -> Tensor:
    found: Tensor = getattr(output, name)[0]
    return found[output.logprobs[0] != 0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [1, 4, 9])
@torch.no_grad()
def test_a_row_says_the_same_alone_and_padded_on_either_side_beside_longer_rows(family: str, padding: int) -> None:
    """T04: CarperAI/trlx#509, huggingface/trl#469."""
    made = policy(family)
    alone = said(made, [tokens_of(LENGTH)], LENGTH, left=False)
    longer = [tokens_of(LENGTH), tokens_of(LENGTH + padding, shift=5), tokens_of(3, shift=2)]
    for left in (True, False):
        together = said(made, longer, LENGTH + padding, left)
        for name in ("logprobs", "values", "entropy"):
            mine, theirs = first_row(alone, name), first_row(together, name)
            assert len(mine) == LENGTH - 2
            torch.testing.assert_close(theirs, mine, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_responses_are_those_of_a_loop_without_cache_or_padding(family: str) -> None:
    """Prompts of 2 to 10 and 12 new tokens, beyond the windows of 6; so cold that only the best is drawn."""
    made = policy(family)
    config = RolloutConfig(max_new_tokens=12, temperature=1e-5)
    prompts = [[1, *tokens_of(1 + row, shift=3 * row)] for row in range(9)]
    responses = TransformersEngine(made, tiny_tokenizer(), config).generate(prompts, seeds=list(range(9)))
    for prompt, response in zip(prompts, responses, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 12 and (len(ids) == len(prompt) or ids[-1] != 2):
            ids.append(int(made.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert response.ids == ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_value_loss_teaches_head_and_trunk(family: str) -> None:
    made = policy(family)
    said(made, [tokens_of(LENGTH), tokens_of(4)], LENGTH, left=False).values.square().sum().backward()
    assert made.value_head is not None
    for weight in (made.value_head.weight, made.model.get_input_embeddings().weight):
        assert weight.grad is not None
        assert bool(weight.grad.isfinite().all())
        assert float(weight.grad.abs().max()) > 0


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_no_dropout_rate_of_a_config_survives_loading(family: str, tmp_path: Path) -> None:
    """T06: in training mode the loaded policy repeats itself, and the model it was loaded from does not."""
    careless = tiny_model(family, **DROPOUT.get(family, {"attention_dropout": 0.3}), attention="eager")
    careless.save_pretrained(tmp_path)
    ids = torch.tensor([tokens_of(LENGTH)])
    evaluated = careless(input_ids=ids).logits
    careless.train()
    assert not torch.equal(careless(input_ids=ids).logits, evaluated)
    made = loaded(tmp_path).train()
    assert torch.equal(made.model(input_ids=ids).logits, made.model(input_ids=ids).logits)
    torch.testing.assert_close(made.model(input_ids=ids).logits, evaluated, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_soft_cap_on_attention_scores_survives_loading(tmp_path: Path) -> None:
    """The fused kernel leaves it out; a cap this small shows in the logits."""
    made = tiny_model("gemma2", attn_logit_softcapping=0.05, attention="eager")
    made.save_pretrained(tmp_path)
    ids = torch.tensor([tokens_of(LENGTH)])
    capped = made(input_ids=ids).logits
    assert (tiny_model("gemma2", attention="eager")(input_ids=ids).logits - capped).abs().max() > 0.1
    torch.testing.assert_close(loaded(tmp_path).model(input_ids=ids).logits, capped)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_saved_policy_loads_again_with_equal_logits_and_ties(family: str, tmp_path: Path) -> None:
    """T26."""
    tiny_model(family).save_pretrained(tmp_path / "start")
    made = loaded(tmp_path / "start")
    saved(made, tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    ids = torch.tensor([tokens_of(LENGTH)])
    assert torch.equal(again.model(input_ids=ids).logits, made.model(input_ids=ids).logits)
    for one in (made, again):
        tied = one.model.get_input_embeddings().weight is one.model.get_output_embeddings().weight
        assert tied == (family in TIED)
    written = sum(tensor.numel() for tensor in load_file(tmp_path / "saved" / "model.safetensors").values())
    assert written == sum(parameter.numel() for parameter in made.model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_one_real_iteration_trains_the_family(family: str, tmp_path: Path) -> None:
    """Through the entry point: rollout, scoring, update, verified sync, evaluation, checkpoint."""
    toy: dict[str, Any] = make_toy(tmp_path / "toy")
    start = tiny_model(family, vocab_size=TOKENS, initializer_range=0.05)
    start.save_pretrained(tmp_path / "toy" / "policy")
    segment = toy_segment(tmp_path / "run", {**toy, "iterations": 1})
    assert run_segment(segment, token=0, attempt=1) == ExitCode.DONE
    (metrics,) = (event.payload for event in journal(segment, "metrics") if event.iteration == 1)
    assert metrics["policy/first_minibatch_ratio_max_dev"] < 1e-4
    assert metrics["rollout/engine_gap_max"] < 1e-4
    # Before any update the policy is its reference.
    assert metrics["kl/ref_token"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["optimizer/steps"] == 4
    assert metrics["limit/fraction"] is None or metrics["limit/fraction"] > 0
    trained = loaded(checkpoints(segment)[-1] / "policy").model
    tied = trained.get_input_embeddings().weight is trained.get_output_embeddings().weight
    assert tied == (family in TIED)
    before, after = dict(start.named_parameters()), dict(trained.named_parameters())
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before if not silent(name, before[name]))


def silent(name: str, parameter: Tensor) -> bool:
    """Weights without influence on any output, so without gradient: biases of keys shift all scores alike."""
    return name.endswith("k_proj.bias") and parameter.dim() == 1
