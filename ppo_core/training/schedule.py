"""The learning rate as a pure function of the number of optimizer steps, so that a restart has nothing to restore."""

from __future__ import annotations

import math

from ppo_core.spec.groups import UpdateConfig


def learning_rate_factor(step: int, num_steps: int, update: UpdateConfig) -> float:
    """What the base rates are multiplied by at optimizer step `step` (the first is 0) of `num_steps`.

    Rises linearly over `warmup_steps`, then stays, or falls to zero just after the last step, by a line or half a
    cosine.
    """
    if step < update.warmup_steps:
        return (step + 1) / update.warmup_steps
    if update.lr_schedule == "constant":
        return 1.0
    left = max(1, num_steps - update.warmup_steps)
    progress = min(1.0, (step - update.warmup_steps) / left)
    return 1.0 - progress if update.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
