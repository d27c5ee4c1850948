"""The groups of a run spec: every field bounded, described once, and marked with when it may change.

Forms, the OpenAPI page and the docs read descriptions and bounds from here. Who scores stands in `scorers`. What is not
built is not offered: a choice appears here with the code that honours it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ppo_core.spec.engines import VLLM_TEMPERATURES, VLLMConfig
from ppo_core.spec.scorers import JudgeConfig
from ppo_core.spec.setting import Group, Misfits, PathText, setting

# An adaptive KL coefficient is kept between these, score a nat: it is multiplied, so from 0 it would never return.
ADAPTIVE_KL_COEF = (1e-6, 100.0)
# Beyond this share of the target an adaptive controller answers no harder: one odd batch must not swing the penalty.
MAX_KL_ERROR = 0.2


class LoRAConfig(Group):
    """Low-rank adapters beside every linear map of the policy's trunk; the weights themselves stay as they are."""

    rank: int = setting(16, "fork", "Rank of each adapter.", ge=1, le=1024)
    alpha: int = setting(32, "fork", "The adapters' product is multiplied by alpha / rank.", ge=1, le=4096)


class PolicyConfig(Group):
    """The model that is trained, and where its value estimate comes from."""

    model: PathText = setting(
        ..., "fork", "Causal language model to start from: a folder in Hugging Face form.", path=True
    )
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "fork",
        "Precision of weights and passes. With `bfloat16` the optimizer keeps float32 masters, and the microbatches "
        "of the old-logprob pass are kept for the whole update.",
    )
    value_head: Literal["shared", "shared_detached", "separate"] = setting(
        "shared",
        "fork",
        "Where values come from: a head on the policy's trunk, whose loss trains the trunk (`shared`) or not "
        "(`shared_detached`), or a critic model of its own (`separate`).",
    )
    critic_model: PathText | None = setting(
        None,
        "fork",
        "Model that a separate critic starts from, of the policy's tokenizer; null: the policy's own.",
        path=True,
    )
    lora: LoRAConfig | None = setting(
        None, "fork", "Train low-rank adapters (and the value head or critic) only; null: all weights are trained."
    )
    gradient_checkpointing: bool = setting(
        False, "rollback", "Make layers again in the backward pass instead of keeping them: less memory, more time."
    )

    @model_validator(mode="after")
    def _critic_is_used(self) -> Self:
        if self.critic_model is not None and self.value_head != "separate":
            message = f"critic_model is given but value_head is {self.value_head!r}; set value_head to 'separate'"
            raise Misfits([("/critic_model", message)])
        return self


class DataConfig(Group):
    """Where prompts come from."""

    prompts: PathText = setting(
        ...,
        "fork",
        "Training prompts: a .jsonl, .csv or .parquet file, a folder that the datasets library saved, or "
        "hub:owner/name where the server allows it. A row has a `prompt` text or a `messages` list (docs/data.md).",
        path=True,
    )
    held_out: PathText | None = setting(
        None, "fork", "Prompts never trained on, in the same form, for evaluation and the judge gate.", path=True
    )
    max_prompt_tokens: int = setting(64, "fork", "Longest prompt in tokens.", ge=1, le=131072)
    too_long: Literal["drop", "cut"] = setting(
        "drop",
        "fork",
        "Prompts longer than max_prompt_tokens are left out (`drop`), or lose their beginning (`cut`: the last tokens "
        "stay, behind the begin-of-text). Counted either way.",
    )
    seed: int | None = setting(
        None,
        "rollback",
        "Decides what is drawn anew in every iteration: prompts' order, responses, and how their rows are dealt out to "
        "optimizer steps. Null: `seed` does. Another one gives a roll back other data to learn from.",
        ge=0,
        le=2**53 - 1,
    )


class RolloutConfig(Group):
    """How responses are sampled. Nothing is filled in from the model folder's generation defaults."""

    engine: Literal["transformers", "vllm"] = setting(
        "transformers",
        "rollback",
        "What generates the responses: the trainer itself (`transformers`), or vLLM (`vllm`): in processes of its own, "
        "for which it has to be installed, or in servers.",
    )
    vllm: VLLMConfig = setting(VLLMConfig(), "rollback", "The vLLM engine; not looked at with `transformers`.")
    batch_size: int = setting(64, "fork", "Prompts, and so responses, an iteration.", ge=1, le=65536)
    max_new_tokens: int = setting(40, "rollback", "Longest response in tokens, end-of-text included.", ge=1, le=131072)
    temperature: float = setting(
        1.0, "rollback", "Divides the logits when sampling, and in every logprob pass.", gt=0, le=10
    )
    top_p: float = setting(
        1.0,
        "rollback",
        "Only the fewest likeliest tokens whose probabilities add up to this are drawn; below 1 needs `renormalize`.",
        gt=0,
        le=1,
    )
    top_k: int = setting(
        0,
        "rollback",
        "Only so many likeliest tokens are drawn; above 0 (off) needs `renormalize`.",
        ge=0,
        le=1_000_000,
    )
    min_new_tokens: int = setting(
        0,
        "rollback",
        "So many first tokens are never a stop id, and stop strings are looked for after them; above 0 needs "
        "`renormalize`.",
        ge=0,
        le=131072,
    )
    renormalize: bool = setting(
        False,
        "rollback",
        "Allows top_p, top_k and min_new_tokens: logprobs, KL and entropy are then of the distributions over the very "
        "tokens that could be drawn at each position, which are kept with the rollout.",
    )
    stop_ids: list[Annotated[int, Field(ge=0, le=1_000_000)]] = setting(
        [], "rollback", "Token ids that end a response, besides the model's end-of-text.", max_length=64
    )
    stop_strings: list[Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00]+$")]] = setting(
        [], "rollback", "Texts that end a response once they appear in it.", max_length=16
    )

    @property
    def starts_vllm(self) -> bool:
        """Whether the run has vLLM processes of its own."""
        return self.engine == "vllm" and not self.vllm.servers

    @property
    def limits_sampling(self) -> bool:
        """Whether any token may be kept from being drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_new_tokens > 0

    @model_validator(mode="after")
    def _limits_are_accounted_for(self) -> Self:
        misfits = []
        limits = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_new_tokens": self.min_new_tokens > 0}
        if not self.renormalize:
            # Logprobs over all tokens would be of another distribution than the responses: KL turns negative.
            misfits = [
                (
                    f"/{name}",
                    f"{name} {getattr(self, name):g} changes the distribution that responses come from, so that "
                    "logprobs over all tokens would be wrong; set rollout.renormalize to true, or leave the field out",
                )
                for name, limits_it in limits.items()
                if limits_it
            ]
        if self.min_new_tokens >= self.max_new_tokens:
            message = (
                f"min_new_tokens {self.min_new_tokens} leaves no place for an end within max_new_tokens "
                f"{self.max_new_tokens}, so every response would be cut off; lower it"
            )
            misfits.append(("/min_new_tokens", message))
        if misfits:
            raise Misfits(misfits)
        return self

    @model_validator(mode="after")
    def _engine_can_do_it(self) -> Self:
        if self.engine != "vllm":
            return self
        limits = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_new_tokens": self.min_new_tokens > 0}
        misfits = [
            (
                f"/{name}",
                f"{name} {getattr(self, name):g} limits what is drawn, and vLLM does not say which tokens could be; "
                "leave the field out, or set rollout.engine to transformers",
            )
            for name, limits_it in limits.items()
            if limits_it
        ]
        low, high = VLLM_TEMPERATURES
        if not low <= self.temperature <= high:
            message = (
                f"temperature is {self.temperature:g} but vLLM samples at {low:g} to {high:g}; set rollout.temperature "
                "in between, or rollout.engine to transformers"
            )
            misfits.append(("/temperature", message))
        if misfits:
            raise Misfits(misfits)
        return self


class KLConfig(Group):
    """The penalty that keeps the policy near its reference."""

    coef: float = setting(
        0.05,
        "rollback",
        "Weight of the per-token KL to the reference in the reward; with `adaptive` the one to begin with, and again "
        "after a roll back that changes it.",
        ge=0,
        le=100,
    )
    controller: Literal["fixed", "adaptive"] = setting(
        "fixed", "rollback", "How the coefficient moves: `fixed`, or `adaptive` towards kl.target."
    )
    estimator: Literal["k1", "k2", "k3"] = setting("k1", "rollback", "Per-token estimator of the penalty.")
    target: float | None = setting(
        None,
        "rollback",
        "KL to the reference that `adaptive` aims at, nats a response (kl/ref_sequence); null with `fixed`.",
        gt=0,
        le=100_000,
    )
    horizon: int | None = setting(
        None,
        "rollback",
        "Responses over which `adaptive` makes its full correction, at most 20 %; null with `fixed`.",
        ge=1,
        le=1_000_000_000,
    )

    @model_validator(mode="after")
    def _controller_has_what_it_needs(self) -> Self:
        adaptive = self.controller == "adaptive"
        needs = {
            "target": (self.target, "set the KL that it aims at, nats a response, such as 6"),
            "horizon": (self.horizon, "set the responses that a full correction takes, such as 10000"),
        }
        misfits = []
        for name, (value, remedy) in needs.items():
            if adaptive and value is None:
                misfits.append((f"/{name}", f"kl.controller is adaptive but kl.{name} is null; {remedy}"))
            if not adaptive and value is not None:
                message = (
                    f"kl.{name} is {value:g} but kl.controller is fixed and takes none; set kl.controller to adaptive, "
                    f"or kl.{name} to null"
                )
                misfits.append((f"/{name}", message))
        low, high = ADAPTIVE_KL_COEF
        if adaptive and not low <= self.coef <= high:
            message = (
                f"kl.coef is {self.coef:g} but an adaptive coefficient is multiplied and kept within {low:g} and "
                f"{high:g}; set kl.coef to a value in between, such as 0.05"
            )
            misfits.append(("/coef", message))
        if misfits:
            raise Misfits(misfits)
        return self


class GAEConfig(Group):
    """Generalised advantage estimation."""

    gamma: float = setting(1.0, "rollback", "Discount a token.", ge=0, le=1)
    lam: float = setting(0.95, "rollback", "Trace decay a token.", ge=0, le=1)


class UpdateConfig(Group):
    """How one rollout batch becomes gradient steps."""

    epochs: int = setting(
        2, "rollback", "Passes over one rollout batch; above 4, KL rises for little gain.", ge=1, le=16
    )
    minibatches: int = setting(
        4,
        "rollback",
        "Optimizer steps a pass; sizes differ by at most one row, in bfloat16 by at most one microbatch.",
        ge=1,
        le=1024,
    )
    clip_range: float = setting(0.2, "rollback", "The ratio is clipped to 1 ± clip_range.", gt=0, lt=1)
    value_clip_range: float | None = setting(
        0.2, "rollback", "New values are clipped to the old ± this; null switches the clip off.", gt=0, le=1000
    )
    value_coef: float = setting(1.0, "rollback", "Weight of the value loss, which has its ½ inside.", ge=0, le=1000)
    entropy_coef: float = setting(0.0, "rollback", "Weight of the entropy bonus.", ge=0, le=10)
    max_grad_norm: float = setting(1.0, "rollback", "The joint gradient norm is clipped to this.", gt=0, le=1e6)
    learning_rate: float = setting(1.0e-5, "rollback", "AdamW's rate for the policy.", gt=0, le=1)
    value_learning_rate: float | None = setting(
        None, "rollback", "AdamW's rate for the value head or critic; null: the policy's.", gt=0, le=1
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant", "rollback", "After warm-up: constant, or falling to zero at the last step."
    )
    warmup_steps: int = setting(
        0, "rollback", "Optimizer steps over which the rate rises from zero.", ge=0, le=1_000_000
    )
    token_budget: int = setting(
        4096,
        "rollback",
        "Most tokens of one microbatch, padding included where there is any; a longer row stands alone.",
        ge=1,
        le=4_194_304,
    )
    pack_rows: bool = setting(
        False, "rollback", "Lay the rows of a microbatch end to end instead of padding them; needs a kernel that can."
    )
    target_kl: float | None = setting(
        None, "rollback", "The epochs end early once a minibatch's approx KL exceeds this.", gt=0, le=100
    )
    critic_warmup_iterations: int = setting(
        0,
        "rollback",
        "First iterations in which only the value head, or the separate critic, learns.",
        ge=0,
        le=1_000_000,
    )
    ratio_tolerance: float = setting(
        0.005, "rollback", "Largest |ratio - 1| before the first optimizer step of an iteration.", gt=0, le=1
    )
    max_skipped_steps: int = setting(
        5, "rollback", "Non-finite steps in a row after which the run fails.", ge=1, le=1000
    )

    @property
    def row_layout(self) -> Literal["padded", "packed"]:
        """How the rows of a microbatch lie in every pass."""
        return "packed" if self.pack_rows else "padded"


class GateConfig(Group):
    """The judge gate: held-out answers compared by a judge, in pairs, with the last gate and with the start."""

    every: int = setting(50, "rollback", "Iterations between gates.", ge=1, le=1_000_000)
    prompts: int = setting(
        128, "rollback", "Held-out prompts answered at a gate: the first ones of the file.", ge=2, le=65536
    )
    judge: JudgeConfig | None = setting(None, "rollback", "Who compares; null: nothing watches for reward hacking.")
    action: Literal["stop", "pause", "note"] = setting("stop", "rollback", "What a tripped gate does to the run.")


class EvaluationConfig(Group):
    """Scores of held-out prompts while training."""

    every: int = setting(10, "rollback", "Iterations between evaluations.", ge=1, le=1_000_000)
    prompts: int = setting(128, "rollback", "Held-out prompts answered: the first ones of the file.", ge=1, le=65536)


class SamplesConfig(Group):
    """Texts and token records that are kept to be read."""

    every: int = setting(1, "rollback", "Iterations between kept samples.", ge=1, le=1_000_000)
    per_iteration: int = setting(8, "rollback", "Responses kept at such an iteration.", ge=0, le=4096)


class CheckpointsConfig(Group):
    """When checkpoints are written, and which stay."""

    every: int = setting(
        20, "rollback", "Iterations between checkpoints; the last iteration always has one.", ge=1, le=1_000_000
    )
    keep_last: int = setting(3, "rollback", "Newest checkpoints that stay; -1 keeps all.", ge=-1, le=100_000)
    keep_every: int | None = setting(
        None, "rollback", "Checkpoints at multiples of this iteration stay.", ge=1, le=1_000_000
    )
    keep_best: int = setting(1, "rollback", "Checkpoints with the best held-out judge score that stay.", ge=0, le=1000)

    @model_validator(mode="after")
    def _keeps_something(self) -> Self:
        if self.keep_last == 0:
            message = "keep_last is 0: nothing to go back to would stay; use at least 1, or -1 to keep all"
            raise Misfits([("/keep_last", message)])
        return self


class ResourcesConfig(Group):
    """What the run occupies."""

    gpus: int = setting(0, "rollback", "GPUs that the run owns; 0 runs on the CPU.", ge=0, le=1024)
    priority: int = setting(
        0,
        "rollback",
        "Higher is claimed first. `ppo edit` and the API change it at any time.",
        ge=-100,
        le=100,
    )
    max_hours: float | None = setting(
        None, "rollback", "The run stops with a checkpoint after this time.", gt=0, le=8760
    )
