"""Averages over real tokens: the one place in `ppo_core` where a mean, a variance or a quantile is taken.

Every reduction takes a mask of x's own shape (bool or 0/1, True on real tokens) and optionally the process group over
whose ranks it reduces. What stands at masked positions, NaN and inf included, reaches neither a result nor a gradient:
it is replaced with `where` before any arithmetic, because 0 * NaN is NaN. Sums run in float64 after the values have
been centred on one of them, so that equal values, however large, have a variance of exactly 0. The module knows nothing
of PPO, and reads no global state: ranks are joined only through `group`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ppo_core.errors import ShapeError


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32 or float64: these stay as they are, every narrower type (bfloat16, integers, bool) is raised."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def real_tokens(mask: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
    """The mask as bool, then the tensors in one floating type with 0 at masked positions.

    This is how a function of several per-token tensors begins: shapes are checked by name, and after it nothing masked
    can leak, forward or backward.

    Args:
        mask: bool or 0/1.
        tensors: by the name that an error shall show, all of the mask's shape.

    Returns:
        mask, then the tensors in the order given: float64 if one of them is, otherwise float32.

    Raises:
        ShapeError: a tensor's shape is not the mask's.
    """
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ShapeError(f"{name} has shape {list(tensor.shape)}, its mask {list(mask.shape)}")
    real = mask.bool()
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors.values()) else torch.float32
    return (real, *(torch.where(real, tensor.to(dtype), 0.0) for tensor in tensors.values()))


def all_reduced(x: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """x reduced over the ranks of the group, without gradient; x itself, gradient and all, where there is no group."""
    if group is None:
        return x
    reduced = x.detach().clone()
    dist.all_reduce(reduced, op=op, group=group)
    return reduced


def masked_count(mask: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Number of real tokens over all ranks of the group, a float64 scalar."""
    return all_reduced(mask.bool().sum(dtype=torch.float64), group)


def masked_sum(x: Tensor, mask: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum over real tokens and all ranks of the group, added up in float64; a scalar in x's dtype, 0 without a token.

    With a group the result carries no gradient, as in every function here.
    """
    _, values = real_tokens(mask, x=x)
    return all_reduced(values.sum(dtype=torch.float64), group).to(values.dtype)


def masked_mean(x: Tensor, mask: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum over real tokens / number of real tokens, over the whole batch and all ranks of the group.

    Args:
        x: any shape; float32 or float64 is kept, other types are raised to float32.
        mask: x's shape, bool or 0/1.
        group: ranks to reduce over; None is this process alone. With a group the result carries no gradient.

    Returns:
        Scalar in x's dtype; 0 where there is no real token.

    Raises:
        ShapeError: x and mask differ in shape.

    Example: x 1 2 NaN 6, mask 1 1 0 1 gives 3.
    """
    real, values = real_tokens(mask, x=x)
    return _mean(values.double(), real, group).to(values.dtype)


def masked_var(x: Tensor, mask: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Biased variance over real tokens: the mean squared distance from their mean, divided by n and not n - 1.

    One token therefore has variance 0 and not NaN. Arguments and errors are `masked_mean`'s.
    """
    real, values = real_tokens(mask, x=x)
    _, variance = _moments(values.double(), real, group)
    return variance.to(values.dtype)


def masked_std(x: Tensor, mask: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Square root of `masked_var`, x's unit; 0 for one token and for none. Its gradient is infinite where it is 0."""
    real, values = real_tokens(mask, x=x)
    _, variance = _moments(values.double(), real, group)
    return variance.sqrt().to(values.dtype)


def masked_whiten(x: Tensor, mask: Tensor, eps: float = 1e-8, group: ProcessGroup | None = None) -> Tensor:
    """(x - mean) / sqrt(var + eps) on real tokens, with the mean and variance of the whole batch and all ranks.

    Args:
        x: any shape; float32 or float64 is kept, other types are raised to float32.
        mask: x's shape, bool or 0/1.
        eps: added to the variance inside the root, x's unit squared.
        group: ranks whose tokens share one mean and variance; None is this process alone.

    Returns:
        x's shape and dtype, 0 where masked. Equal values, and a single token, become 0.

    Raises:
        ShapeError: x and mask differ in shape.

    Example: x 1 3 gives -1 1 (the variance is biased).
    """
    real, values = real_tokens(mask, x=x)
    wide = values.double()
    mean, variance = _moments(wide, real, group)
    return torch.where(real, (wide - mean) * torch.rsqrt(variance + eps), 0.0).to(values.dtype)


def masked_max(x: Tensor, mask: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Largest real value over all ranks of the group, a scalar in x's dtype; 0 without a real token. No gradient."""
    real, values = real_tokens(mask, x=x)
    largest = _largest(values.detach().double(), real, group)
    return torch.where(torch.isneginf(largest) & (masked_count(real, group) == 0), 0.0, largest).to(values.dtype)


def masked_quantile(x: Tensor, mask: Tensor, q: float, group: ProcessGroup | None = None) -> Tensor:
    """The q-quantile (q in [0, 1]) of the real values of all ranks, interpolated linearly; 0 without a real token.

    The values themselves travel between ranks, for a quantile cannot be made of the ranks' own quantiles. No gradient.
    """
    real, values = real_tokens(mask, x=x)
    ordered = _gathered(values.detach()[real].double(), group).sort().values
    if ordered.numel() == 0:
        return values.new_zeros(())
    # By hand and not with torch.quantile, which refuses more than 16 million values.
    place = q * (ordered.numel() - 1)
    low = int(place)
    high = min(low + 1, ordered.numel() - 1)
    return torch.lerp(ordered[low], ordered[high], place - low).to(values.dtype)


def masked_correlation(x: Tensor, y: Tensor, mask: Tensor, group: ProcessGroup | None = None) -> float | None:
    """Pearson correlation of x and y over real tokens and all ranks, in [-1, 1]; None where either does not vary."""
    real, x_real, y_real = real_tokens(mask, x=x, y=y)
    x_wide, y_wide = x_real.detach().double(), y_real.detach().double()
    x_mean, x_var = _moments(x_wide, real, group)
    y_mean, y_var = _moments(y_wide, real, group)
    if x_var == 0 or y_var == 0:
        return None
    covariance = _mean((x_wide - x_mean) * (y_wide - y_mean), real, group)
    return float((covariance / (x_var.sqrt() * y_var.sqrt())).clamp(-1.0, 1.0))


def masked_slope(x: Tensor, y: Tensor, mask: Tensor, group: ProcessGroup | None = None) -> float | None:
    """Slope of the least-squares line of y over x, y's unit per x's, over real tokens and all ranks.

    None where x does not vary: no line is better than another. Example: x 1 2 3, y 1 1 4 gives 1.5.
    """
    real, x_real, y_real = real_tokens(mask, x=x, y=y)
    x_wide, y_wide = x_real.detach().double(), y_real.detach().double()
    x_mean, x_var = _moments(x_wide, real, group)
    if x_var == 0:
        return None
    y_mean = _mean(y_wide, real, group)
    return float(_mean((x_wide - x_mean) * (y_wide - y_mean), real, group) / x_var)


def masked_row_sum(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] to [B]: each row's sum over its real tokens, added up in float64, x's dtype; 0 for an empty row."""
    _, values = real_tokens(mask, x=x)
    return values.sum(dim=-1, dtype=torch.float64).to(values.dtype)


def masked_row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] to [B]: each row's mean over its real tokens, x's dtype; 0 for an empty row."""
    real, values = real_tokens(mask, x=x)
    counts = real.sum(dim=-1, dtype=torch.float64).clamp(min=1)
    return (values.sum(dim=-1, dtype=torch.float64) / counts).to(values.dtype)


def _mean(values: Tensor, real: Tensor, group: ProcessGroup | None) -> Tensor:
    """Mean of the real entries of a float64 tensor whose masked entries are finite; 0 without one."""
    # Every rank must centre on the same number: the largest value does, and one rank without tokens has -inf.
    centre = _largest(values.detach(), real, group)
    centre = torch.where(torch.isfinite(centre), centre, 0.0)
    total = all_reduced(torch.where(real, values - centre, 0.0).sum(), group)
    count = masked_count(real, group)
    return torch.where(count > 0, centre + total / count.clamp(min=1), 0.0)


def _moments(values: Tensor, real: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the real entries of a float64 tensor whose masked entries are finite."""
    mean = _mean(values, real, group)
    squares = torch.where(real, values - mean, 0.0).square().sum()
    return mean, all_reduced(squares, group) / masked_count(real, group).clamp(min=1)


def _largest(values: Tensor, real: Tensor, group: ProcessGroup | None) -> Tensor:
    """Largest real entry, -inf without one."""
    lowest = values.new_full((1,), -torch.inf)
    candidates = torch.cat((lowest, torch.where(real, values, -torch.inf).flatten()))
    return all_reduced(candidates.amax(), group, dist.ReduceOp.MAX)


def _gathered(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """The one-dimensional tensors of all ranks, one after the other, whatever their lengths."""
    if group is None:
        return values
    world_size = dist.get_world_size(group)
    lengths = [torch.zeros((), dtype=torch.int64, device=values.device) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor(values.numel(), device=values.device), group=group)
    # Collectives want equal shapes: pad to the longest, cut again afterwards.
    longest = max(int(length) for length in lengths)
    padded = torch.nn.functional.pad(values, (0, longest - values.numel()))
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])
