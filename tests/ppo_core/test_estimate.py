"""What a spec means in numbers: worked by hand, memory too; what real runs hold is compared in test_memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_core.estimate import Estimate, estimate
from ppo_core.memory import PROGRAM_BYTES
from ppo_core.spec import parse_spec
from ppo_core.spec.advice import value_clip_warning

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
# 2 layers of 32·(32 + 2·16) + 32·32 + 3·32·64 weights, 5 norms of 32, one embedding of 100·32.
TINY_PARAMETERS = 2 * (2048 + 1024 + 6144) + 160 + 3200


def spec_with(**groups: Any) -> Any:
    data: dict[str, Any] = {
        "name": "t",
        "policy": {"model": "/nowhere/policy"},
        "data": {"prompts": "/nowhere/train.jsonl", "held_out": "/nowhere/held.jsonl"},
        "reward": {"sources": [{"kind": "python", "name": "r"}]},
        "gate": {"judge": {"kind": "python", "name": "vader"}},
    }
    for name, value in groups.items():
        data[name] = {**data[name], **value} if isinstance(data.get(name), dict) and isinstance(value, dict) else value
    return parse_spec(data)


def warned(found: Estimate, text: str) -> bool:
    return any(text in warning for warning in found.warnings)


def test_the_default_spec_in_numbers() -> None:
    found = estimate(spec_with(), TINY)
    assert found.responses == 6400
    assert found.response_tokens_max == 256_000
    assert found.optimizer_steps == 800
    assert found.meaning[0] == "100 iterations × 64 prompts = 6,400 responses, at most 256,000 response tokens"
    assert found.meaning[1] == "2 epochs × 4 minibatches of about 16 responses an iteration = 800 optimizer steps"
    assert found.warnings == ()


def test_states_are_sixteen_bytes_trained_four_frozen() -> None:
    found = estimate(spec_with(), TINY)
    assert found.policy_parameters == TINY_PARAMETERS
    assert found.memory is not None
    assert found.memory.states_bytes == 16 * (TINY_PARAMETERS + 33) + 4 * TINY_PARAMETERS
    assert found.checkpoint_bytes == 4 * TINY_PARAMETERS + 12 * (TINY_PARAMETERS + 33)
    assert found.memory.peak_bytes > PROGRAM_BYTES + found.memory.states_bytes


def test_config_and_reward_models_are_read_from_their_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    source = {"kind": "sequence_classifier", "model": str(tmp_path)}
    found = estimate(spec_with(policy={"model": str(tmp_path)}, reward={"sources": [source]}))
    assert found.policy_parameters == TINY_PARAMETERS
    assert found.reward_parameters == (TINY_PARAMETERS,)


def test_a_family_that_cannot_be_counted_is_none_with_a_warning() -> None:
    found = estimate(spec_with(), {"model_type": "gpt_neox"})
    assert found.policy_parameters is found.memory is found.checkpoint_bytes is found.disk_bytes is None
    assert warned(found, "memory and disk are not known")


@pytest.mark.parametrize("text", ["[1]", "{", '"x"', "\x00"])
def test_a_broken_config_is_none_with_a_warning(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert estimate(spec_with(policy={"model": str(tmp_path)})).policy_parameters is None


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"every": 20}, 5),  # the last 3, the judge's best, those of the last two gates, but no more than are written
        ({"every": 20, "keep_last": -1}, 5),
        ({"every": 30, "keep_last": -1}, 4),  # 30, 60, 90 and the end
        ({"every": 10, "keep_last": 2, "keep_best": 0, "keep_every": 50}, 6),
        ({"every": 1000}, 1),
    ],
)
def test_checkpoints_kept(rules: dict[str, Any], kept: int) -> None:
    found = estimate(spec_with(checkpoints=rules), TINY)
    assert found.checkpoints_kept == kept
    assert found.disk_bytes is not None
    assert found.checkpoint_bytes is not None
    assert found.disk_bytes >= (kept + 1) * found.checkpoint_bytes  # one more while the next is written


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ({"update": {"epochs": 5}}, "update.epochs is 5: above 4"),
        ({"update": {"minibatches": 32}}, "leaves 2 responses"),
        ({"update": {"warmup_steps": 800}}, "the learning rate is never reached"),
        ({"update": {"critic_warmup_iterations": 100}}, "the policy never learns"),
        ({"update": {"token_budget": 100}}, "a row may have 104 tokens"),
        ({"reward": {"missing_eos_penalty": -10.0}}, "update.value_clip_range is 0.2"),
        ({"reward": {"missing_eos_penalty": 0.0}}, "endless answer"),
        ({"reward": {"clip": 0.5}}, "hides part of it"),
        ({"reward": {"sources": [{"kind": "python", "name": "r", "weight": 0.0}]}}, "weight 0"),
        ({"kl": {"coef": 0.0}}, "kl.coef is 0"),
        (
            {"kl": {"controller": "adaptive", "target": 6.0, "horizon": 100_000}},
            "the run has 6400 responses: in all of it kl.coef can move by about 1.3%",
        ),
        (
            {"reward": {"length_baseline": "linear"}, "rollout": {"batch_size": 15}, "update": {"minibatches": 2}},
            "a slope through so few responses is mostly noise",
        ),
        (
            {"reward": {"normalize": True}, "update": {"value_clip_range": 0.05}},
            "update.value_clip_range is 0.05 but scores spread over about 1:",
        ),
        ({"reward": {"clip": 5.0}}, "scores spread over about 5:"),
        ({"gate": {"judge": None}}, "nothing watches for reward hacking"),
        ({"gate": {"every": 101}}, "the gate never looks"),
        (
            {"alerts": {"bands": {"response/eos_rate": {"low": 0.9}}}},
            "alerts.bands.response/eos_rate.low is 0.9, a bound of the distance to the run's baseline: what is usual",
        ),
        ({"alerts": {"bands": {"response/length_mean": {"high": 0.5}}}}, "a bound of the factor to the run's baseline"),
        (
            {"gate": {"prompts": 64}},
            "gate.prompts is 64: a win rate of one half is then uncertain by ± 0.12; 128 and more",
        ),
        ({"gate": {"judge": None}, "data": {"held_out": None}}, "no data.held_out"),
        ({"checkpoints": {"every": 101}}, "only its end is saved"),
        ({"gate": {"judge": None}, "checkpoints": {"keep_best": 2}}, "no judge to say which are best"),
    ],
)
def test_what_is_likely_to_disappoint_is_said(groups: dict[str, Any], text: str) -> None:
    assert warned(estimate(spec_with(**groups), TINY), text)


def test_bounds_around_what_is_usual_are_no_surprise() -> None:
    bands = {
        "response/eos_rate": {"low": -0.1}, "response/length_mean": {"high": 2.0}, "policy/approx_kl": {"high": 0.1},
        "response/identical": {"high": 0.2}, "kl/ref_sequence": None,
    }  # fmt: skip
    assert estimate(spec_with(alerts={"bands": bands}), TINY).warnings == ()


def test_fewer_held_out_prompts_than_a_gate_asks_for_are_counted(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "a"}\n' * 100)
    found = estimate(spec_with(data={"held_out": str(held_out)}, gate={"prompts": 300}), TINY)
    assert warned(found, "gate.prompts is 300 but data.held_out has 100 prompts")
    assert warned(found, "± 0.10")
    assert any("answers to 100 held-out prompts" in line for line in found.meaning)
    enough = estimate(spec_with(data={"held_out": str(held_out)}, gate={"prompts": 100}), TINY)
    assert not warned(enough, "but data.held_out has")


def test_a_small_value_clip_is_measured_against_the_scores_spread() -> None:
    assert value_clip_warning(0.2, 2.0) is None
    assert "spread over about 2.5" in str(value_clip_warning(0.2, 2.5))
    assert value_clip_warning(None, 1e9) is None


def test_normalised_scores_spread_over_about_one_whatever_their_limit() -> None:
    """A limit of five deviations is there for the rare response, and tells nothing of the others."""
    assert estimate(spec_with(reward={"clip": 5.0, "normalize": True}), TINY).warnings == ()


def test_what_happens_to_scores_and_kl_is_said() -> None:
    plain = "each nat of KL to the reference costs 0.05 of score"
    assert plain in estimate(spec_with(), TINY).meaning
    steered = {"controller": "adaptive", "target": 6.0, "horizon": 10_000}
    found = estimate(spec_with(kl=steered, reward={"normalize": True, "length_baseline": "linear"}), TINY)
    assert f"{plain} at first, and then what holds a response's KL at 6 nats" in found.meaning
    assert any("least-squares line" in line for line in found.meaning)
    assert any("running standard deviations" in line for line in found.meaning)
    assert found.warnings == ()


def test_the_estimate_is_strict_json() -> None:
    found = estimate(spec_with(), TINY)
    again = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert again["memory"]["peak_bytes"] == found.memory.peak_bytes if found.memory else False
    assert isinstance(again["meaning"], list)


def test_a_trained_weight_in_bfloat16_takes_sixteen_bytes() -> None:
    """2 and a gradient of 2, a float32 master and two moments; a frozen one 2. Gradients are added up in 4, not 2."""
    found = estimate(spec_with(policy={"dtype": "bfloat16"}), TINY)
    assert found.memory is not None
    assert found.memory.states_bytes == 16 * (TINY_PARAMETERS + 33) + 2 * TINY_PARAMETERS
    assert found.memory.states.gradient_sums_bytes == 2 * (TINY_PARAMETERS + 33)
    assert found.checkpoint_bytes == 2 * TINY_PARAMETERS + 12 * (TINY_PARAMETERS + 33)


def test_adapters_leave_the_policy_itself_frozen() -> None:
    """Rank 4 beside 7 maps in 2 layers: 4 · 2 · (2 · (32 + 32) + 2 · (32 + 16) + 3 · (32 + 64)) = 4,096 parameters."""
    found = estimate(spec_with(policy={"lora": {"rank": 4}}), TINY)
    assert found.memory is not None
    assert found.memory.states_bytes == 16 * (4096 + 33) + 8 * TINY_PARAMETERS


def test_from_a_checkpoint_only_what_is_left_counts() -> None:
    """Iterations 61 to 100: checkpoints, samples and gates of the 60 before are made already."""
    spec = spec_with(
        iterations=100, rollout={"batch_size": 64}, checkpoints={"every": 30, "keep_last": -1}, gate={"every": 50}
    )
    whole, rest = estimate(spec, TINY), estimate(spec, TINY, start_iteration=60)
    assert (whole.responses, rest.responses) == (6400, 2560)
    assert rest.response_tokens_max == 2560 * spec.rollout.max_new_tokens
    assert rest.optimizer_steps == whole.optimizer_steps * 40 // 100
    assert (whole.checkpoints_kept, rest.checkpoints_kept) == (4, 2)
    assert rest.meaning[0].startswith("40 iterations (61 to 100) × 64 prompts = 2,560 responses")
    assert any("every 50 iterations, 1 time;" in line for line in rest.meaning)
    assert estimate(spec, TINY, start_iteration=100).responses == 0
