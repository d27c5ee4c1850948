"""What the vLLM worker learns for us: to take over weights, to say what it received, and to say what it did not load.

The class is mixed into vLLM's own worker, in whose process it runs. Before weights are loaded every one that is there
becomes NaN, and so does all memory that loading makes anew; a NaN that is left afterwards is a weight that did not
come. That holds however a model fuses, splits or repacks its weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.rollout.shared_weights import read_weights
from ppo_core.rollout.weights import weights_digest

# Inputs whose images under a repacked map stand for it in a fingerprint.
NUM_PROBING_ROWS = 16


class WeightReceiver:
    """Mixed into vLLM's worker by `worker_extension_cls`; each method is called there by name on every worker."""

    get_model: Callable[[], Any]  # the worker's own
    reload_weights: Callable[..., None]  # the worker's own
    compute_weight_checksums: Callable[[], dict[str, str]]  # the worker's own

    def take_over(self, path: str, index: list[dict[str, Any]]) -> dict[str, Any]:
        """Load shared weights (see `ppo_core.rollout.shared_weights`) and report what arrived.

        Returns:
            `digest` of what this process read, `num_tensors`, and the names of weights that are `not_loaded`.
        """
        pairs = read_weights(path, index)
        digest = weights_digest(pairs)
        forget_weights(self.get_model())
        with _new_memory_is_nan():
            self.load_pairs(pairs)
        return {"digest": digest, "num_tensors": len(pairs), "not_loaded": weights_not_loaded(self.get_model())}

    def load_pairs(self, pairs: list[tuple[str, Tensor]]) -> None:
        """Load weights that are named as in a Hugging Face checkpoint."""
        self.reload_weights(weights_iterator=iter(pairs))
        repack_tied(self.get_model())

    def weights_fingerprint(self) -> dict[str, str]:
        """SHA-256 of every tensor that the model computes with; of a repacked one, of what it makes of fixed inputs."""
        found = dict(self.compute_weight_checksums())
        for name, module in _repacked(self.get_model()):
            inputs = torch.linspace(-1, 1, NUM_PROBING_ROWS * _num_inputs(module))
            image = module.cpu_linear(_rows_for(module, inputs), module.weight, None)
            found[f"{name}.repacked"] = hashlib.sha256(image.float().numpy().data).hexdigest()
        return found


def forget_weights(model: nn.Module) -> None:
    """Make every weight of the model NaN, so that it can say nothing until it is loaded anew."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(torch.nan)
    for _, module in _repacked(model):
        module.cpu_linear = _forgotten


def repack_tied(model: nn.Module) -> None:
    """An output embedding that is tied to the input's gets no weights of its own, so loading does not repack it."""
    for _, module in _repacked(model):
        if module.cpu_linear is _forgotten and module.weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)


def weights_not_loaded(model: nn.Module) -> list[str]:
    """Names of weights of which at least one element is NaN."""
    found = [name for name, weight in model.named_parameters() if bool(weight.isnan().any())]
    for name, module in _repacked(model):
        ones = torch.ones(_num_inputs(module))
        if module.cpu_linear is _forgotten or bool(
            module.cpu_linear(_rows_for(module, ones), module.weight, None).isnan().any()
        ):
            found.append(f"{name}.weight")
    return found


def _repacked(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules whose weight vLLM repacked for the processor: the parameter itself is empty or no longer read."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "cpu_linear"))


def _forgotten(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    raise RuntimeError("this map was not loaded since its weights were forgotten")


def _num_inputs(module: Any) -> int:
    """How many numbers a repacked map takes: of a linear layer on this worker, or of an output embedding."""
    for name in ("input_size_per_partition", "input_size", "embedding_dim"):
        if hasattr(module, name):
            return int(getattr(module, name))
    raise TypeError(f"the number of inputs of a {type(module).__name__} is not known")


def _rows_for(module: Any, numbers: Tensor) -> Tensor:
    return numbers.view(-1, _num_inputs(module)).to(module.weight.dtype)


@contextmanager
def _new_memory_is_nan() -> Iterator[None]:
    """Memory that torch hands out unset is filled with NaN, as its deterministic mode does."""
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)
