"""From a folder to networks that are ready: in the spec's precision, no dropout, never code from the model's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from ppo_core.errors import DataError
from ppo_core.models.adapters import add_adapters
from ppo_core.models.critic import CriticModel
from ppo_core.models.policy import PolicyModel
from ppo_core.models.trunk import RowLayout
from ppo_core.spec.groups import PolicyConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(config: PolicyConfig, layout: RowLayout = "padded", seed: int = 0) -> PolicyModel:
    """The trained policy of a run, in evaluation mode. What is trained has a gradient: all of it, or its adapters.

    Args:
        config: the spec's.
        layout: how rows are laid out in every pass.
        seed: the run's; adapters start from a stream of it.

    Raises:
        DataError: the model cannot be loaded, or is of a kind that cannot be trained here.
    """
    with named_field("policy.model"):
        model = load_causal_lm(config.model, DTYPES[config.dtype])
    if config.lora is not None:
        add_adapters(model, config.lora, seed)
    return PolicyModel(model, config.value_head, layout, config.gradient_checkpointing).eval()


def load_reference(config: PolicyConfig, layout: RowLayout = "padded") -> PolicyModel:
    """The frozen reference: the policy as it starts, without gradient. Adapters start as if they were not there.

    Raises:
        DataError: as `load_policy`.
    """
    with named_field("policy.model"):
        model = load_causal_lm(config.model, DTYPES[config.dtype])
    return PolicyModel(model, "separate", layout).eval().requires_grad_(False)


def load_critic(config: PolicyConfig, layout: RowLayout = "padded") -> CriticModel | None:
    """The separate critic, every weight with a gradient, in evaluation mode; None where the value head is shared.

    It starts from the body of `critic_model`, or of the policy's own model where that is null.

    Raises:
        DataError: it cannot be loaded, reads other tokens than the policy, or looks ahead.
    """
    if config.value_head != "separate":
        return None
    path = config.critic_model or config.model
    with named_field("policy.model" if config.critic_model is None else "policy.critic_model"):
        body = _load(AutoModel, "critic", path, DTYPES[config.dtype])
    if config.critic_model is not None:
        theirs, ours = load_tokenizer(path).get_vocab(), load_tokenizer(config.model).get_vocab()
        if theirs != ours:
            raise DataError(
                f"the tokenizers of policy.critic_model {path!r} ({len(theirs)} tokens) and policy.model "
                f"{config.model!r} ({len(ours)} tokens) differ, so an id means another text to each",
                hint="Give a critic of the policy's own tokenizer, or null to start from the policy's model.",
            )
    return CriticModel(body, layout, config.gradient_checkpointing).eval()


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder. Its pad id is not touched: padding is marked by masks here, never by an id.

    Raises:
        DataError: there is none, or it cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"no tokenizer can be loaded from {str(path)!r}: {_first_line(error)}") from error


def load_causal_lm(path: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """A Hugging Face causal language model, its dropout off everywhere.

    Raises:
        DataError: it cannot be loaded.
    """
    return _load(AutoModelForCausalLM, "causal language model", path, dtype)


@contextlib.contextmanager
def named_field(field: str) -> Iterator[None]:
    """What cannot be loaded within is told with the spec's field that names it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{field}: {error}", hint=error.hint) from error


@contextlib.contextmanager
def whole_weights(path: str | Path) -> Iterator[None]:
    """Weights that cannot be read within are told with their file.

    Raises:
        DataError: a file of weights is damaged.
    """
    try:
        yield
    except SafetensorError as error:
        file = _damaged_file(Path(path)) or path
        raise DataError(
            f"the weights in {str(file)!r} are cut short or damaged: {_first_line(error)}",
            hint="Put the whole file in its place, then start the run again: `ppo retry RUN`.",
        ) from error


def _damaged_file(folder: Path) -> Path | None:
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return file
    return None


def _load(kind: Any, what: str, path: str | Path, dtype: torch.dtype) -> Any:
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        switch_off_dropout(config)
        try:
            kernel = "eager" if caps_attention_scores(config) else "sdpa"
            model = _from_pretrained(kind, path, config, dtype, kernel)
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            # The family has no fused kernel; its own attention is slower and otherwise the same.
            model = _from_pretrained(kind, path, config, dtype, "eager")
    except DataError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(
            f"no {what} can be loaded from {str(path)!r}: {_first_line(error)}",
            hint="Give a folder with config.json and .safetensors weights of a causal language model.",
        ) from error
    switch_off_dropout_modules(model)
    let_every_id_learn(model)
    return model


def caps_attention_scores(config: Any) -> bool:
    """Whether only the model's own attention computes what its configuration says.

    The fused kernel has no soft cap on attention scores and leaves it out without a word (Gemma 2; measured: with a
    cap of 0.05, logits of a tiny model are off by 0.7).
    """
    return getattr(config, "attn_logit_softcapping", None) is not None


def switch_off_dropout(config: Any) -> None:
    """Set every dropout rate in a model's configuration to 0; rates have many names, but all say "drop".

    Source: CarperAI/trlx#107, dropout in one of two passes makes the first ratio differ from 1.
    """
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def switch_off_dropout_modules(model: nn.Module) -> None:
    """The same for rates that modules hold themselves."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def let_every_id_learn(model: Any) -> None:
    """Give the pad id's embedding a gradient, too: padding is masked, so where that id is read it is a token.

    torch keeps the gradient of an embedding's `padding_idx` at 0, and most families set it. Where the pad id is the
    end-of-text or begin-of-text id, what a policy reads of these tokens could never be trained.

    Source: huggingface/trl#5303, the same id taken for padding in a mask.
    """
    model.get_input_embeddings().padding_idx = None


def _from_pretrained(kind: Any, path: str | Path, config: Any, dtype: torch.dtype, attention: str) -> Any:
    with whole_weights(path):
        loaded: Any = kind.from_pretrained(
            str(path),
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    model, report = loaded
    if report["missing_keys"]:
        # They would be filled with random numbers, and the run would train noise.
        missing = sorted(report["missing_keys"])
        raise ValueError(f"{len(missing)} weights are not in its files, {missing[0]} first")
    return model


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
