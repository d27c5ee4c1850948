"""What a run measures about itself."""

from ppo_core.diagnostics.statistics import explained_variance

__all__ = ["explained_variance"]
