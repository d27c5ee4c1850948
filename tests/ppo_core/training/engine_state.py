"""The weights and moments of a train engine of one rank, whole and by name."""

from __future__ import annotations

from torch import Tensor

from ppo_core.training.engine import TrainEngine


def whole_state(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: part.values for name, part in engine.export_state().items()}
