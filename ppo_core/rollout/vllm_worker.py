"""What the vLLM worker learns for us: to say what weights it received, and which of its own did not come.

The class is mixed into vLLM's own worker, in whose process it runs. Before weights are loaded every one that is there
becomes NaN, and so does all memory that loading makes anew; a NaN that is left afterwards is a weight that did not
come. That holds however a model fuses, splits or repacks its weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ppo_core.rollout.vllm_shared_memory  # noqa: F401  (vLLM finds that way by its name)
from ppo_core.rollout.vllm_settings import shape_of
from ppo_core.rollout.weights import digest_of, line_of

# Inputs whose images under a repacked map stand for it in a fingerprint.
NUM_PROBING_ROWS = 16


class WeightReceiver:
    """Mixed into vLLM's worker by `worker_extension_cls`; each method is called there by name on every worker."""

    get_model: Callable[[], Any]  # the worker's own
    compute_weight_checksums: Callable[[], dict[str, str]]  # the worker's own
    vllm_config: Any  # the worker's own
    weight_transfer_engine: Any  # the worker's own
    _weight_update_active: bool  # the worker's own

    def describe(self) -> dict[str, Any]:
        """What a trainer that did not start this engine has to know of it."""
        config = self.vllm_config
        transfer = config.weight_transfer_config
        return {
            "shape": shape_of(config.model_config.hf_config),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_model_len": config.model_config.max_model_len,
            "logprobs_mode": config.model_config.logprobs_mode,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "transfer": None if transfer is None else transfer.backend,
            "world_size": config.parallel_config.world_size,
        }

    def read_back(self, path: str) -> dict[str, str | None]:
        """What stands in a file: a trainer that reads its own token here shares this machine's memory."""
        try:
            return {"text": Path(path).read_text(encoding="ascii")}
        except (OSError, UnicodeDecodeError):
            return {"text": None}

    def give_up_update(self) -> None:
        """End an update whose trainer was killed within it, as vLLM ends one that fails."""
        if self._weight_update_active:
            self._weight_update_active = False
            self.weight_transfer_engine.reset_weight_update_target()

    def begin_receiving(self) -> None:
        """From here on the model holds nothing, and whatever it is given to load is noted down first."""
        self.give_up_update()
        model = self.get_model()
        vars(model).pop("load_weights", None)  # of an update that was given up
        lines: list[str] = []
        load_plainly = model.load_weights

        def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> Any:
            pairs = list(weights)
            lines.extend(line_of(name, tensor) for name, tensor in pairs)
            return self.load_pairs(load_plainly, pairs)

        forget_weights(model)
        vars(model)["load_weights"] = load_and_note
        self.received_lines = lines
        # Memory that torch hands out unset is filled with NaN, as its deterministic mode does.
        torch.use_deterministic_algorithms(True, warn_only=True)

    def load_pairs(self, load: Callable[[Iterable[tuple[str, Tensor]]], Any], pairs: list[tuple[str, Tensor]]) -> Any:
        """Load weights that are named as in a Hugging Face checkpoint."""
        return load(pairs)

    def end_receiving(self) -> dict[str, Any]:
        """What arrived: `digest` and `num_tensors` of what this process was given to load, and the names of weights of
        the model's own that were `not_loaded` by it."""
        torch.use_deterministic_algorithms(False)
        model = self.get_model()
        del vars(model)["load_weights"]
        repack_tied(model)
        lines = self.received_lines
        return {"digest": digest_of(lines), "num_tensors": len(lines), "not_loaded": weights_not_loaded(model)}

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
