"""AdamW with one joint gradient norm, on float32 masters whatever the precision of the weights.

A float32 weight is its own master. A bfloat16 weight has a float32 copy that the optimizer moves, and its gradients
are added up in float32: steps smaller than bfloat16 can hold, and microbatches, are not lost in rounding.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class MasterWeights:
    """The float32 masters of a model's trained weights, by parameter name."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._weights = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self.by_name: dict[str, Tensor] = {name: self._master(weight) for name, weight in self._weights.items()}

    def copy_to_weights(self) -> None:
        """Round the masters into the weights."""
        with torch.no_grad():
            for name, weight in self._weights.items():
                if weight is not self.by_name[name]:
                    weight.copy_(self.by_name[name])

    @staticmethod
    def _master(weight: nn.Parameter) -> Tensor:
        if weight.dtype == torch.float32:
            return weight
        master = weight.detach().float().requires_grad_()

        def gather(own: Tensor) -> None:
            assert own.grad is not None  # The hook runs right after it was made.
            grad = own.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            own.grad = None

        weight.register_post_accumulate_grad_hook(gather)  # type: ignore[no-untyped-call]
        return master


class ClippedAdamW:
    """AdamW over groups of (weights, base rate), their gradients clipped by one joint norm.

    Moments decay as is customary; there is no weight decay, since the KL penalty is what holds a policy back.
    """

    def __init__(self, groups: list[tuple[list[Tensor], float]], max_grad_norm: float) -> None:
        self._base_rates = [rate for _, rate in groups]
        self._max_grad_norm = max_grad_norm
        self._adamw = torch.optim.AdamW(
            [{"params": weights, "lr": rate} for weights, rate in groups], weight_decay=0.0, fused=True
        )

    def clip(self) -> float:
        """Scale the gradients down to the largest norm allowed, and return their joint norm before that."""
        weights = [weight for group in self._adamw.param_groups for weight in group["params"]]
        return float(nn.utils.clip_grad_norm_(weights, self._max_grad_norm))

    def step(self, factor: float) -> list[float]:
        """One step at the base rates times `factor`; returns the rates. A weight without a gradient is left alone."""
        rates = [rate * factor for rate in self._base_rates]
        for group, rate in zip(self._adamw.param_groups, rates, strict=True):
            group["lr"] = rate
        self._adamw.step()
        return rates

    def clear(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def moments(self, weight: Tensor) -> dict[str, Tensor]:
        """`step`, `exp_avg` and `exp_avg_sq` of one weight; empty before its first step."""
        state = self._adamw.state.get(weight, {})
        return {key: state[key] for key in MOMENTS if key in state}

    def take_moments(self, weight: Tensor, moments: dict[str, Tensor]) -> None:
        """Go on from these moments; from none, as at the start."""
        self._adamw.state.pop(weight, None)
        if moments:
            # Beside the weight: a checkpoint is read on the host.
            self._adamw.state[weight] = {key: each.to(weight.device, copy=True) for key, each in moments.items()}
