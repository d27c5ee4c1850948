"""Statistics of one batch with a definition of their own; plain masked means need no function here."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from ppo_core.masked import masked_var, real_tokens


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, group: ProcessGroup | None = None
) -> float | None:
    """1 - Var(returns - values) / Var(returns): the share of the returns' spread that the critic foresees.

    Args:
        values: [B, T], reward-model units; entries outside the mask are ignored.
        returns: [B, T], same units; entries outside the mask are ignored.
        mask: [B, T] bool or 0/1, True on response tokens.
        group: ranks whose tokens count together; None is this process alone.

    Returns:
        At most 1 (values are the returns, up to a constant), 0 for a critic that says the same everywhere, negative
        for one that is worse than that; None where the returns do not vary and nothing could be explained.

    Raises:
        ShapeError: the three tensors differ in shape.

    Example: returns 0 2, values 1 3 give 1; values 1 1 give 0; values 2 0 give -3.
    """
    real, predicted, actual = real_tokens(mask, values=values.detach().double(), returns=returns.detach().double())
    spread = masked_var(actual, real, group)
    if spread == 0:
        return None
    return float(1 - masked_var(actual - predicted, real, group) / spread)
