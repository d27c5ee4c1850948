"""From a folder or hub id to networks that are ready: float32, no dropout, never code from the model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ppo_core.errors import DataError
from ppo_core.models.policy import PolicyModel, ValueHeadKind


def load_policy(path: str | Path, value_head: ValueHeadKind = "shared") -> PolicyModel:
    """The trained policy of a run, in evaluation mode; every weight has a gradient.

    Raises:
        DataError: the model cannot be loaded, or is of a kind that cannot be trained here.
    """
    return PolicyModel(load_causal_lm(path), value_head).eval()


def load_reference(path: str | Path) -> PolicyModel:
    """The frozen reference: the policy's starting weights, without gradient. Its value head means nothing.

    Raises:
        DataError: as `load_policy`.
    """
    return PolicyModel(load_causal_lm(path)).eval().requires_grad_(False)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder. Its pad id is not touched: padding is marked by masks here, never by an id.

    Raises:
        DataError: there is none, or it cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"no tokenizer can be loaded from {str(path)!r}: {_first_line(error)}") from error


def load_causal_lm(path: str | Path) -> Any:
    """A Hugging Face causal language model in float32, its dropout off everywhere.

    Raises:
        DataError: it cannot be loaded.
    """
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        switch_off_dropout(config)
        try:
            model = _from_pretrained(path, config, "sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            # The family has no fused kernel; its own attention is slower and otherwise the same.
            model = _from_pretrained(path, config, "eager")
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(
            f"no causal language model can be loaded from {str(path)!r}: {_first_line(error)}",
            hint="Give a folder with config.json and .safetensors weights of a causal language model.",
        ) from error
    switch_off_dropout_modules(model)
    return model


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


def _from_pretrained(path: str | Path, config: Any, attention: str) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(path),
        config=config,
        dtype=torch.float32,
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
