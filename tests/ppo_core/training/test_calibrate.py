"""The measured ceiling: a believable number, quickly, and with no effect on the run's randomness."""

from __future__ import annotations

import time

import torch

from ppo_core.model_shape import model_shape
from ppo_core.training.calibrate import calibrate

SHAPE = model_shape(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
    }
)


def test_the_ceiling_is_at_least_what_a_product_reaches_here() -> None:
    assert SHAPE is not None
    speed = calibrate(SHAPE, torch.device("cpu"), rows=256, seconds=0.1)
    left, right = torch.ones(256, 64), torch.ones(64, 512)
    start = time.perf_counter()
    for _ in range(20):
        left @ right
    reached = 20 * 2.0 * 256 * 64 * 512 / (time.perf_counter() - start)
    assert 1e7 < speed < 1e15
    assert speed > 0.3 * reached


def test_calibration_draws_no_random_number() -> None:
    assert SHAPE is not None
    before = torch.get_rng_state()
    calibrate(SHAPE, torch.device("cpu"), rows=16, seconds=0.01)
    assert torch.equal(before, torch.get_rng_state())
