"""Shared memory as one more way on which vLLM's weight-transfer interface takes weights in, beside those of GPUs.

Imported by vLLM's workers alone. Loading is vLLM's own, layer by layer, as for the ways that it brings along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ppo_core.rollout.shared_weights import read_weights
from ppo_core.rollout.vllm_settings import SHARED_MEMORY


@dataclass
class NothingToAgreeOn(WeightTransferInitInfo):
    """Both sides know the layout from each update's index."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """Where the weights lie: see `ppo_core.rollout.shared_weights`."""

    path: str
    index: list[dict[str, Any]]


class SharedMemoryTransfer(WeightTransferEngine[NothingToAgreeOn, SharedMemoryUpdate]):
    """Reads weights from memory that the trainer shares; every worker takes its part of them."""

    init_info_cls = NothingToAgreeOn
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: NothingToAgreeOn) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        self.model.load_weights(read_weights(update_info.path, update_info.index))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryTransfer)
