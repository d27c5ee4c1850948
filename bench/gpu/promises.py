"""What is promised of a run on a GPU, each with the number that was found and the one that it is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.gpu.observations import GIB, Observations
from ppo_core.rollout.transformers_engine import PROBE_TOLERANCE
from ppo_core.rollout.vllm_engine import ROUTE_TOLERANCE
from ppo_core.rollout.vllm_settings import CUDA_IPC

# All of it: a model made, both runs with their loading.
LIMIT_S = 720.0
RATIO_TOLERANCE = 0.005
# Of the engine's share of the card: what is left are its CUDA context, captured graphs and buffers outside its pools.
GIVEN_BACK = 0.75
# Nats, in bfloat16 with kernels of two kinds. Rules of thumb: a stale or mixed-up weight is off by far more.
GAP_MEAN, GAP_K3 = 0.02, 0.002
GAP_MAX = ROUTE_TOLERANCE[torch.bfloat16]


@dataclass(frozen=True)
class Promise:
    """`found` is None where there was nothing to see, which keeps no promise."""

    of: str
    text: str
    found: float | str | None
    wanted: str
    is_kept: bool


def promises_of(seen: Observations) -> list[Promise]:
    """All that is promised of one run."""

    def at_most(text: str, values: Sequence[float], limit: float) -> Promise:
        found = max(values, default=None)
        # `not <=` in one: NaN keeps nothing, and neither do iterations of which nothing is known.
        is_kept = len(values) == count and all(value <= limit for value in values)
        return Promise(seen.engine, text, found, f"at most {limit:g}, in each of {count} iterations", is_kept)

    def equal(text: str, found: float | str, wanted: float | str) -> Promise:
        return Promise(seen.engine, text, found, f"{wanted}", found == wanted)

    count = seen.num_iterations
    digests = [sync.digest for sync in seen.syncs]
    given_back = [
        (sleep.free_asleep - sleep.free_awake) / seen.share_bytes if seen.share_bytes else 0.0 for sleep in seen.sleeps
    ]
    least = min(given_back, default=None)
    return [
        equal("the run reaches its end", seen.error or f"exit code {seen.exit_code}", "exit code 0"),
        equal("iterations with metrics", len(seen.values("time/iteration_s")), count),
        equal("weights come by CUDA IPC", seen.transfer, CUDA_IPC),
        equal("versions that were synced and verified", str([each.version for each in seen.syncs]), str(_up_to(count))),
        equal("digests that differ from each other", len(set(digests)), count),
        equal("digest of the last sync is that of the trainer's weights", _last(digests), seen.trainer_digest or "any"),
        at_most(
            "probe gap after a sync, nats", [each.probe_gap for each in seen.syncs], PROBE_TOLERANCE[torch.bfloat16]
        ),
        Promise(
            seen.engine,
            f"share of its {seen.share_bytes / GIB:.1f} GiB that the engine gives back asleep",
            least,
            f"at least {GIVEN_BACK:g}, in each of {count} iterations",
            len(given_back) == count and all(share >= GIVEN_BACK for share in given_back),
        ),
        at_most(
            "max |ratio - 1| before the first step",
            seen.values("policy/first_minibatch_ratio_max_dev"),
            RATIO_TOLERANCE,
        ),
        at_most("engine gap, mean, nats", seen.values("rollout/engine_gap_mean"), GAP_MEAN),
        at_most("engine gap, max, nats", seen.values("rollout/engine_gap_max"), GAP_MAX),
        at_most("engine gap, k3, nats", seen.values("rollout/engine_gap_k3"), GAP_K3),
        at_most("optimizer steps skipped", seen.values("optimizer/skipped"), 0.0),
        equal("engine processes that outlive the run", seen.num_left, 0),
    ]


def in_time(seconds: float) -> Promise:
    """The promise of the whole script."""
    return Promise(
        "both", "seconds of everything, loading included", seconds, f"at most {LIMIT_S:g}", seconds <= LIMIT_S
    )


def _up_to(count: int) -> list[int]:
    return list(range(1, count + 1))


def _last(digests: list[str]) -> str:
    return digests[-1] if digests else "none"
