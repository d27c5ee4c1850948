"""For each spec field a change that must be seen in a toy run, or the reason why none can be.

A case says what the base run has (`base`), the field's other value, what has to change along with it so that the
groups still fit together (`along`), and where the difference must show. Values may name files and functions of the toy
as `{other_policy}`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# What is compared of two runs: metrics of each iteration (times and the like left out), the weights and optimizer
# state in the checkpoints, the kept samples, the checkpoints that are there and those that its rules keep, the shapes
# of the passes through the policy, and how the run ended.
View = Literal["metrics", "weights", "samples", "checkpoints", "kept", "passes", "end"]


@dataclass(frozen=True)
class Case:
    """Two runs: the toy with `base`, and the same with `value` in the field and `along` besides."""

    value: Any
    shows: View = "weights"
    base: dict[str, Any] = field(default_factory=dict)
    along: dict[str, Any] = field(default_factory=dict)
    fault: Literal["", "nan", "drift", "hacking"] = ""


CLASSIFIER_JUDGE = {"kind": "sequence_classifier", "model": "{other_reward}"}
PYTHON_JUDGE = {"kind": "python", "name": "length"}
PYTHON_SOURCE = {"kind": "python", "name": "length"}
HTTP_SOURCE = {"kind": "http", "url": "{service}"}
ANSWERING_EVERY_OTHER_TIME = {"kind": "http", "url": "{flaky_service}", "retries": 1}
COMPARING_JUDGE = {"kind": "openai", "url": "{chat_service}", "served_model": "prefers-longer", "retries": 0}
ADAPTIVE = {"kl.controller": "adaptive", "kl.target": 1000.0, "kl.horizon": 8}
# The first iteration starts at the reference, so that its KL is 0; the second one's decides the third's coefficient.
DRIFTING = {**ADAPTIVE, "iterations": 3, "update.learning_rate": 0.01}
CASES: dict[str, Case] = {
    "seed": Case(2),
    "iterations": Case(3, "metrics"),
    "policy.model": Case("{other_policy}"),
    "policy.dtype": Case("bfloat16"),
    "policy.value_head": Case("shared_detached"),
    "policy.critic_model": Case("{reward_model}", base={"policy.value_head": "separate"}),
    "policy.lora": Case({}),
    "policy.lora.rank": Case(2, base={"policy.lora": {}}),
    "policy.lora.alpha": Case(64, base={"policy.lora": {}}),
    "policy.gradient_checkpointing": Case(True, "passes"),
    "data.prompts": Case("{other_prompts}"),
    "data.held_out": Case("{other_prompts}", "metrics"),
    "data.max_prompt_tokens": Case(12, base={"data.held_out": None}),
    "data.too_long": Case("cut", base={"data.max_prompt_tokens": 12, "data.held_out": None}),
    "data.seed": Case(2),
    "rollout.batch_size": Case(6),
    "rollout.max_new_tokens": Case(5),
    "rollout.temperature": Case(0.7),
    "rollout.top_p": Case(0.5, base={"rollout.renormalize": True}),
    "rollout.top_k": Case(5, base={"rollout.renormalize": True}),
    "rollout.min_new_tokens": Case(6, base={"rollout.renormalize": True, "rollout.stop_ids": list(range(3, 67))}),
    "rollout.renormalize": Case(True, "end", along={"rollout.top_k": 5}, base={"rollout.top_k": 5}),
    "rollout.stop_ids": Case(list(range(3, 67))),
    "rollout.stop_strings": Case(["a", "e", "l", "o", "s", "t"]),
    "reward.sources": Case([PYTHON_SOURCE]),
    "reward.sources[].kind": Case("python", along={"reward.sources[].model": None, "reward.sources[].name": "length"}),
    "reward.sources[].model": Case("{other_reward}"),
    "reward.sources[].name": Case("share_of_vowels", base={"reward.sources": [PYTHON_SOURCE]}),
    "reward.sources[].weight": Case(0.5),
    "reward.sources[].template": Case("{response}, {prompt}"),
    "reward.sources[].chat_template": Case(True, base={"reward.sources[].model": "{other_reward}"}),
    "reward.sources[].url": Case("{other_service}", base={"reward.sources": [HTTP_SOURCE]}),
    "reward.sources[].batch_size": Case(3, base={"reward.sources": [HTTP_SOURCE]}),
    "reward.sources[].retries": Case(0, "end", base={"reward.sources": [ANSWERING_EVERY_OTHER_TIME]}),
    "reward.fallback": Case(
        0.5,
        base={"reward.sources": [{"kind": "python", "name": "sometimes"}], "reward.max_invalid_share": 0.95},
    ),
    "reward.missing_eos_penalty": Case(-3.0, base={"rollout.stop_ids": list(range(3, 67))}),
    "reward.length_baseline": Case("linear", base={"rollout.stop_ids": list(range(3, 67))}),
    "reward.normalize": Case(True),
    "reward.clip": Case(0.1),
    "reward.timeout_s": Case(0.01, "end", base={"reward.sources": [{"kind": "python", "name": "slow"}]}),
    "reward.max_invalid_share": Case(0.95, "end", base={"reward.sources": [{"kind": "python", "name": "sometimes"}]}),
    "kl.coef": Case(1.0),
    "kl.controller": Case("adaptive", along={"kl.target": 1000.0, "kl.horizon": 8}),
    "kl.estimator": Case("k3"),
    "kl.target": Case(0.001, base=DRIFTING),
    "kl.horizon": Case(80, base=ADAPTIVE),
    "gae.gamma": Case(0.9),
    "gae.lam": Case(0.5),
    "update.epochs": Case(1),
    "update.minibatches": Case(1),
    "update.clip_range": Case(0.01),
    "update.value_clip_range": Case(0.001),
    "update.value_coef": Case(0.1),
    "update.entropy_coef": Case(0.1),
    "update.max_grad_norm": Case(0.01),
    "update.learning_rate": Case(0.002),
    "update.value_learning_rate": Case(0.01),
    "update.lr_schedule": Case("linear"),
    "update.warmup_steps": Case(4),
    "update.token_budget": Case(40, "passes"),
    "update.pack_rows": Case(True, "passes"),
    "update.target_kl": Case(1e-6, "metrics"),
    "update.critic_warmup_iterations": Case(1),
    "update.ratio_tolerance": Case(0.5, "end", fault="drift"),
    "update.max_skipped_steps": Case(100, "end", fault="nan"),
    "gate.every": Case(1, "metrics", base={"gate.judge": CLASSIFIER_JUDGE}),
    "gate.prompts": Case(6, "metrics", base={"gate.judge": CLASSIFIER_JUDGE}),
    "gate.judge": Case(CLASSIFIER_JUDGE, "metrics"),
    "gate.judge.kind": Case(
        "python",
        "metrics",
        base={"gate.judge": CLASSIFIER_JUDGE},
        along={"gate.judge.model": None, "gate.judge.name": "length"},
    ),
    "gate.judge.name": Case("share_of_vowels", "metrics", base={"gate.judge": PYTHON_JUDGE}),
    "gate.judge.model": Case("{against_reward}", "metrics", base={"gate.judge": CLASSIFIER_JUDGE}),
    "gate.judge.template": Case("{response}, {prompt}", "metrics", base={"gate.judge": CLASSIFIER_JUDGE}),
    "gate.judge.chat_template": Case(True, "metrics", base={"gate.judge": CLASSIFIER_JUDGE}),
    "gate.judge.url": Case("{other_service}", "metrics", base={"gate.judge": HTTP_SOURCE}),
    "gate.judge.batch_size": Case(3, "metrics", base={"gate.judge": HTTP_SOURCE}),
    "gate.judge.retries": Case(0, "end", base={"gate.judge": ANSWERING_EVERY_OTHER_TIME}),
    "gate.judge.served_model": Case("prefers-shorter", "metrics", base={"gate.judge": COMPARING_JUDGE}),
    "gate.judge.question": Case("Which is not better?", "metrics", base={"gate.judge": COMPARING_JUDGE}),
    "gate.judge.answer_tokens": Case(1, "end", base={"gate.judge": COMPARING_JUDGE}),
    "gate.action": Case("note", "end", base={"gate.judge": CLASSIFIER_JUDGE}, fault="hacking"),
    "evaluation.every": Case(1, "metrics"),
    "evaluation.prompts": Case(6, "metrics"),
    "samples.every": Case(2, "samples"),
    "samples.per_iteration": Case(3, "samples"),
    "checkpoints.every": Case(1, "checkpoints"),
    "checkpoints.keep_last": Case(1, "kept", base={"checkpoints.every": 1}),
    "checkpoints.keep_every": Case(1, "kept", base={"checkpoints.every": 1, "checkpoints.keep_last": 1}),
    "checkpoints.keep_best": Case(
        6,
        "kept",
        base={
            "iterations": 6,
            "checkpoints.every": 1,
            "checkpoints.keep_last": 1,
            "gate.judge": CLASSIFIER_JUDGE,
            "evaluation.every": 1,
        },
    ),
    "resources.gpus": Case(1, "end"),
    "resources.max_hours": Case(1e-9, "end"),
}

OPTION_OF_VLLM = "tests/ppo_core/rollout/test_vllm_settings.py::test_an_option_reaches_the_engine_on_a_gpu"

# The trainer never looks at these, or several processes are needed to see them: the named test shows it.
SHOWN_BY = {
    "rollout.engine": (
        "tests/ppo_core/rollout/test_vllm_run.py::test_twenty_iterations_with_weights_that_move_and_logprobs_that_agree"
    ),
    "gate.judge.at_once": (
        "tests/ppo_core/scoring/test_pair_judge.py::test_no_more_are_asked_at_once_than_the_spec_says"
    ),
    "gate.judge.request_timeout_s": (
        "tests/ppo_core/scoring/test_pair_judge.py::test_a_request_that_hangs_is_given_up_and_tried_again"
    ),
    "gate.judge.timeout_s": "tests/ppo_core/scoring/test_pair_judge.py::test_nothing_waits_beyond_the_time_for_all",
    "rollout.vllm.servers": "tests/ppo_core/rollout/test_vllm_service.py::test_a_whole_run_with_a_server",
    "rollout.vllm.replicas": (
        "tests/ppo_core/rollout/test_vllm_process.py::test_seeds_decide_whatever_the_number_of_replicas"
    ),
    "rollout.vllm.timeout_s": (
        "tests/ppo_core/rollout/test_vllm_process.py::test_a_process_that_hangs_is_killed_at_the_deadline"
    ),
    "rollout.vllm.tensor_parallel": OPTION_OF_VLLM,
    "rollout.vllm.max_rows": OPTION_OF_VLLM,
    "rollout.vllm.gpu_memory_utilization": OPTION_OF_VLLM,
    "rollout.vllm.kv_cache_gib": (
        "tests/ppo_core/rollout/test_vllm_settings.py::test_the_cache_of_an_engine_on_a_processor_is_as_large_as_asked"
    ),
    "training.engine": "tests/ppo_core/training/test_ranks.py::test_state_is_written_once_by_whoever_holds_it",
    "training.ranks": "tests/ppo_core/training/test_ranks.py::test_every_rank_answers_prompts_of_its_own",
    "training.zero_stage": (
        "tests/ppo_core/training/test_ranks.py::test_at_stage_3_each_rank_holds_half_of_every_parameter"
    ),
    "training.offload": "tests/ppo_core/training/test_ranks.py::test_offloaded_optimizer_states_change_nothing",
    "training.peer_timeout_s": (
        "tests/worker/test_real_ranks.py::test_a_lost_rank_is_named_within_its_deadline_and_nothing_of_it_is_left"
    ),
    "alerts.baseline_iterations": (
        "tests/ppo_core/diagnostics/test_alerts.py::test_a_shorter_baseline_is_learned_from_the_first_iterations_alone"
    ),
    "alerts.bands": "tests/ppo_core/diagnostics/test_bands.py::test_a_run_may_change_a_band_and_switch_one_off",
    "alerts.bands.*.low": "tests/ppo_core/diagnostics/test_bands.py::test_each_bound_of_a_runs_own_band_counts",
    "alerts.bands.*.high": "tests/ppo_core/diagnostics/test_bands.py::test_each_bound_of_a_runs_own_band_counts",
    "alerts.bands.*.red_low": "tests/ppo_core/diagnostics/test_bands.py::test_each_bound_of_a_runs_own_band_counts",
    "alerts.bands.*.red_high": "tests/ppo_core/diagnostics/test_bands.py::test_each_bound_of_a_runs_own_band_counts",
    "alerts.on_warning": "tests/ppo_core/diagnostics/test_alerts.py::test_what_the_spec_says_is_done",
    "alerts.on_critical": (
        "tests/ppo_core/diagnostics/test_alerts.py::test_a_warning_that_turns_red_escalates_the_same_alert"
    ),
    "alerts.on_story": "tests/ppo_core/diagnostics/test_alerts.py::test_what_the_spec_says_is_done",
    "preflight.enabled": "tests/ppo_core/diagnostics/test_preflight.py::test_a_healthy_run_is_checked_once",
    "preflight.audit_answers": "tests/ppo_core/diagnostics/test_preflight.py::test_the_audit_can_be_left_out",
    "name": "tests/ppo/test_train.py::test_the_default_run_directory_is_named_after_the_run",
    "resources.priority": "tests/store/test_queue.py::test_priority_goes_before_age",
}
