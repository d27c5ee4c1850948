"""Every golden vector, in float64 and float32, through the functions of `ppo_core`; see tests/golden/README.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ppo_core.advantages import gae
from ppo_core.alignment import on_grid, response_mask, token_logprobs
from ppo_core.diagnostics import explained_variance
from ppo_core.losses import entropy, policy_loss, token_entropies, value_loss
from ppo_core.masked import masked_mean, masked_row_mean, masked_row_sum, masked_var, masked_whiten
from ppo_core.rewards import kl_penalty, per_token_rewards

GOLDEN = Path(__file__).parents[1] / "golden"
NUM_CASES = 61

# What stands in `expected` and no call of ours returns.
NOT_OURS = {"kl.json": {"abs"}}
# Definitions of other systems that our functions return too, under names of their own.
OUR_VARIANTS = {"clipfrac_active", "value_clipfrac"}


class Case:
    """One golden case at one precision: hands out its inputs as tensors, compares results and remembers which."""

    def __init__(self, file: str, content: dict[str, Any], dtype: torch.dtype) -> None:
        self.file, self.name, self.dtype = file, content["name"], dtype
        self.inputs, self.expected = content["inputs"], content["expected"]
        self.variants = content.get("variants", {})
        self.tolerance = content["tolerance"]["float64" if dtype == torch.float64 else "float32"]
        self.compared: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """An input: floating lists in the case's precision, integer lists as they are, constants as Python numbers."""
        return self.tensor(self.inputs[key])

    def tensor(self, value: Any) -> Any:
        if not isinstance(value, list | np.ndarray):
            return value
        tensor = torch.as_tensor(np.asarray(value))
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def check(self, key: str, got: Any, where: Tensor | None = None) -> None:
        """Compare with `expected[key]` (or the variant of that name); "a.b" is key b inside a."""
        value: Any = {**self.variants, **self.expected}
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        expected = torch.as_tensor(np.asarray(value, dtype=np.float64))
        result = torch.as_tensor(got, dtype=torch.float64)
        assert result.shape == expected.shape, f"{key}: shape {result.shape}, expected {expected.shape}"
        if where is not None:
            expected, result = expected[where.bool()], result[where.bool()]
        excess = (result - expected).abs() / expected.abs().clamp(min=1.0)
        worst = float(excess.amax()) if excess.numel() else 0.0
        # Not `worst > tolerance`, which a NaN would pass.
        assert worst <= self.tolerance, f"{key} is off by {worst:.3g}, tolerance {self.tolerance:.1g}"
        self.compared.add(key)

    def required(self) -> set[str]:
        """Every key that must have been compared, nested ones by their path."""
        keys = set(_paths(self.expected)) - NOT_OURS.get(self.file, set())
        return keys | (OUR_VARIANTS & set(self.variants))


def _paths(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _paths(inner, f"{prefix}{key}.")
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            for index, item in enumerate(inner):
                yield from _paths(item, f"{prefix}{key}.{index}.")
        else:
            yield f"{prefix}{key}"


def check_masked_stats(case: Case) -> None:
    x, mask = case["x"], case["mask"]
    case.check("mean", masked_mean(x, mask))
    case.check("row_means", masked_row_mean(x, mask), where=mask.sum(1) > 0)
    case.check("var", masked_var(x, mask))
    case.check("whitened", masked_whiten(x, mask, eps=case["eps"]))


def check_kl(case: Case) -> None:
    for estimator in ("k1", "k2", "k3"):
        case.check(estimator, kl_penalty(case["logp"], case["logp_ref"], estimator))


def check_logits(case: Case) -> None:
    logits, input_ids = case["logits"], case["input_ids"]
    case.check("logp", token_logprobs(logits, input_ids))
    case.check("entropy", token_entropies(on_grid(logits)))
    everywhere = torch.ones_like(input_ids[:, 1:])
    total = float(torch.tensor(case.expected["entropy"], dtype=torch.float64).sum())
    assert float(entropy(logits, everywhere, num_tokens=1)) == pytest.approx(total, rel=1e-3, abs=1e-5)


def check_rollout(case: Case) -> None:
    mask = response_mask(case["attention_mask"], case["resp_start"], case["resp_len"])
    case.check("mask", mask)
    missing_eos = case["no_eos"] if case["use_no_eos"] else None

    def rewards_of(scores: Tensor, kl_coef: float, penalty: float) -> tuple[Tensor, Tensor]:
        return per_token_rewards(
            scores,
            case["logp_old"],
            case["logp_ref"],
            mask,
            kl_coef,
            missing_eos=missing_eos,
            missing_eos_penalty=penalty,
        )

    rewards, kl = rewards_of(case["score"], case["beta"], case["eos_penalty"])
    if "kl" in case.expected:
        case.check("kl", kl, where=mask)
    case.check("rewards", rewards, where=mask)
    # Without KL the score stands alone, and a score of 1 without penalty marks its own place.
    scores_alone, _ = rewards_of(case["score"], 0.0, case["eos_penalty"])
    case.check("final_score", masked_row_sum(scores_alone, mask), where=mask.any(1))
    marked, _ = rewards_of(torch.ones_like(case["score"]), 0.0, 0.0)
    places = [row.nonzero().flatten().tolist() for row in marked]
    assert all(len(place) <= 1 for place in places)
    case.check("last_index", [place[0] if place else -1 for place in places])

    returns = check_advantages(case, rewards, mask)
    lengths = mask.sum(1).to(case.dtype)
    rows = torch.ones_like(lengths)
    case.check("diagnostics.kl_ref_per_token", masked_mean(kl, mask))
    case.check("diagnostics.kl_ref_per_sequence", masked_mean(masked_row_sum(kl, mask), rows))
    case.check("diagnostics.response_length_mean", masked_mean(lengths, rows))
    case.check("diagnostics.eos_rate", masked_mean((~case["no_eos"]).to(case.dtype), rows))
    variance = explained_variance(case["values"], returns, mask)
    if np.isnan(float(case.expected["diagnostics"]["explained_variance"])):
        assert variance is None
        case.compared.add("diagnostics.explained_variance")
    else:
        case.check("diagnostics.explained_variance", variance)


def check_advantages(case: Case, rewards: Tensor, mask: Tensor) -> Tensor:
    advantages, returns = gae(rewards, case["values"], mask, case["gamma"], case["lam"])
    case.check("adv_raw", advantages, where=mask)
    case.check("returns", returns, where=mask)
    case.check("adv_mean", masked_mean(advantages, mask))
    case.check("adv_var", masked_var(advantages, mask))
    case.check("adv", masked_whiten(advantages, mask))
    return returns


def check_gae(case: Case) -> None:
    check_advantages(case, case["rewards"], case["mask"])


def check_update(case: Case) -> None:
    mask = case["mask"]
    logprobs, values = case["logp_new"].requires_grad_(), case["values_new"].requires_grad_()
    policy_inputs = (logprobs, case["logp_old"], case["adv"])
    value_inputs = (values, case["values_old"], case["returns"])
    policy, stats = policy_loss(*policy_inputs, mask, case["clip"])
    value, value_stats = value_loss(*value_inputs, mask, case["vclip"])
    mean_entropy = masked_mean(case["entropy"], mask)
    assert case["vf_coef"] == 0.5  # the 1/2 that stands inside our value loss
    loss = policy + value - case["ent_coef"] * mean_entropy
    loss.backward()
    case.check("n_tokens", stats.num_tokens)
    case.check("pg_loss", policy.detach())
    case.check("vf_mean", 2 * value.detach())
    case.check("entropy_mean", mean_entropy)
    case.check("loss", loss.detach())
    case.check("approx_kl", stats.approx_kl)
    case.check("clipfrac", stats.clip_fraction)
    case.check("clipfrac_active", stats.clip_fraction_active)
    case.check("value_clipfrac", value_stats.clip_fraction)
    case.check("grad_logp", logprobs.grad)
    case.check("grad_v", values.grad)
    # Per-token results: the same calls, one token at a time.
    ratio, pg, vf = (torch.zeros_like(logprobs) for _ in range(3))
    for row, column in mask.nonzero().tolist():
        single = torch.zeros_like(mask)
        single[row, column] = 1
        token_policy, token_stats = policy_loss(*policy_inputs, single, case["clip"])
        token_value, _ = value_loss(*value_inputs, single, case["vclip"])
        ratio.data[row, column] = token_stats.ratio_mean
        pg.data[row, column] = token_policy.detach()
        vf.data[row, column] = 2 * token_value.detach()
    case.check("ratio", ratio, where=mask)
    case.check("pg", pg, where=mask)
    case.check("vf", vf, where=mask)
    assert float(stats.ratio_max) == pytest.approx(float(ratio.max()), rel=1e-6)


def check_end_to_end(case: Case) -> None:
    input_ids = case["input_ids"]
    mask = response_mask(case["attention_mask"], case["resp_start"], case["resp_len"])
    logits, values = case["logits_new"].requires_grad_(), case["values_new"].requires_grad_()
    old = token_logprobs(case["logits_old"], input_ids)
    ref = token_logprobs(case["logits_ref"], input_ids)
    new = token_logprobs(logits, input_ids)
    rewards, kl = per_token_rewards(
        case["score"],
        old,
        ref,
        mask,
        case["beta"],
        missing_eos=case["no_eos"],
        missing_eos_penalty=case["eos_penalty"],
    )
    advantages, returns = gae(rewards, case["values_old"], mask, case["gamma"], case["lam"])
    whitened = masked_whiten(advantages, mask)
    policy, stats = policy_loss(new, old, whitened, mask, case["clip"])
    value, _ = value_loss(values, case["values_old"], returns, mask, case["vclip"])
    mean_entropy = entropy(logits, mask)
    assert case["vf_coef"] == 0.5
    loss = policy + value - case["ent_coef"] * mean_entropy
    loss.backward()
    case.check("mask", mask)
    case.check("logp_old", old)
    case.check("logp_ref", ref)
    case.check("logp_new", new.detach())
    case.check("kl", kl, where=mask)
    case.check("rewards", rewards, where=mask)
    case.check("adv_raw", advantages, where=mask)
    case.check("returns", returns, where=mask)
    case.check("adv", whitened)
    case.check("entropy", token_entropies(on_grid(logits)).detach())
    case.check("n_tokens", stats.num_tokens)
    case.check("pg_loss", policy.detach())
    case.check("vf_mean", 2 * value.detach())
    case.check("entropy_mean", mean_entropy.detach())
    case.check("loss", loss.detach())
    case.check("approx_kl", stats.approx_kl)
    case.check("clipfrac", stats.clip_fraction)
    case.check("grad_logits_new", logits.grad)
    case.check("grad_values_new", values.grad)


def check_tiny_model(case: Case) -> None:
    """A whole update by plain gradient descent: our functions between the given weights and the final ones."""
    input_ids = case["input_ids"]
    mask = response_mask(case["attention_mask"], case["resp_start"], case["resp_len"])
    assert torch.equal(mask, case["mask"].bool())
    weights = {name: case[name].requires_grad_() for name in ("E", "W_out", "w_value")}
    weights["b_value"] = torch.tensor(case["b_value"], dtype=case.dtype, requires_grad=True)

    def forward(ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = weights["E"][ids].tanh()
        return hidden @ weights["W_out"], on_grid(hidden @ weights["w_value"] + weights["b_value"])

    with torch.no_grad():
        logits, old_values = forward(input_ids)
        old = token_logprobs(logits, input_ids)
        ref = token_logprobs(weights["E"][input_ids].tanh() @ case["W_out_ref"], input_ids)
        rewards, _ = per_token_rewards(
            case["score"],
            old,
            ref,
            mask,
            case["beta"],
            missing_eos=case["no_eos"],
            missing_eos_penalty=case["eos_penalty"],
        )
        raw_advantages, returns = gae(rewards, old_values, mask, case["gamma"], case["lam"])
        advantages = masked_whiten(raw_advantages, mask)
    case.check("logp_old", old)
    case.check("values", old_values)
    case.check("adv", advantages)
    case.check("returns", returns, where=mask)

    steps = [(epoch, rows) for epoch, minibatches in enumerate(case.inputs["minibatches"]) for rows in minibatches]
    assert len(steps) == len(case.expected["stats"])
    for index, (epoch, rows) in enumerate(steps):
        logits, values = forward(input_ids[rows])
        new = token_logprobs(logits, input_ids[rows])
        policy, stats = policy_loss(new, old[rows], advantages[rows], mask[rows], case["clip"])
        value, _ = value_loss(values, old_values[rows], returns[rows], mask[rows], case["vclip"])
        mean_entropy = entropy(logits, mask[rows])
        loss = policy + value - case["ent_coef"] * mean_entropy
        gradients = torch.autograd.grad(loss, list(weights.values()))
        norm = torch.sqrt(sum((gradient.square().sum() for gradient in gradients), torch.zeros(())))
        scale = (case["max_grad_norm"] / (norm + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            for weight, gradient in zip(weights.values(), gradients, strict=True):
                weight -= case["lr"] * scale * gradient
        case.check(f"stats.{index}.epoch", epoch)
        case.check(f"stats.{index}.loss", loss.detach())
        case.check(f"stats.{index}.approx_kl", stats.approx_kl)
        case.check(f"stats.{index}.clipfrac", stats.clip_fraction)
        case.check(f"stats.{index}.entropy", mean_entropy.detach())
        case.check(f"stats.{index}.grad_norm", norm)
    for name, weight in weights.items():
        case.check(name, weight.detach())


CHECKS: dict[str, Callable[[Case], None]] = {
    "masked_stats.json": check_masked_stats,
    "kl.json": check_kl,
    "logits.json": check_logits,
    "rollout.json": check_rollout,
    "rollout_long.npz": check_rollout,
    "gae.json": check_gae,
    "update.json": check_update,
    "end_to_end.json": check_end_to_end,
    "tiny_model.json": check_tiny_model,
}


def _load(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".json":
        return json.loads(path.read_text())["cases"]
    archive = np.load(path)

    def under(prefix: str) -> dict[str, Any]:
        values = {key.removeprefix(prefix): archive[key] for key in archive.files if key.startswith(prefix)}
        return {key: value if value.ndim else value.item() for key, value in values.items()}

    expected = {key: value for key, value in under("out_").items() if not key.startswith("diag_")}
    content = {"name": path.stem, "inputs": under("in_"), "expected": expected, "tolerance": under("tol_")}
    return [content | {"expected": expected | {"diagnostics": under("out_diag_")}}]


def _files() -> list[Path]:
    return sorted(path for path in GOLDEN.iterdir() if path.suffix in (".json", ".npz"))


CONTENTS = {(path.name, content["name"]): content for path in _files() for content in _load(path)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("file", "name"), CONTENTS, ids=["-".join(key) for key in CONTENTS])
def test_golden_case(file: str, name: str, dtype: torch.dtype) -> None:
    CHECKS[file](Case(file, CONTENTS[file, name], dtype))


def test_every_case_and_key_was_compared() -> None:
    """Reads the ledger of a run of its own, so that selecting tests cannot hide what is left out."""
    assert len(CONTENTS) == NUM_CASES
    left_out = []
    for (file, name), content in CONTENTS.items():
        for dtype in (torch.float64, torch.float32):
            case = Case(file, content, dtype)
            CHECKS[file](case)
            left_out += [f"{file} {name} {dtype}: {key}" for key in sorted(case.required() - case.compared)]
    assert not left_out


def test_a_key_that_is_not_compared_is_noticed() -> None:
    case = Case("kl.json", CONTENTS["kl.json", "typical"], torch.float64)
    case.check("k1", kl_penalty(case["logp"], case["logp_ref"]))
    assert case.required() - case.compared == {"k2", "k3"}


def test_a_wrong_result_and_a_nan_are_noticed() -> None:
    case = Case("kl.json", CONTENTS["kl.json", "typical"], torch.float64)
    k1 = kl_penalty(case["logp"], case["logp_ref"])
    for wrong in (k1 + 1e-6, k1 * torch.nan):
        with pytest.raises(AssertionError, match="k1 is off by"):
            case.check("k1", wrong)
