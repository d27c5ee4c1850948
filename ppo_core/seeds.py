"""One seed decides everything: each use of randomness gets its own stream, named by what it is for.

Streams are derived, never shared, so nothing depends on what was drawn before: a restart, another number of ranks
or another order of rows changes no draw. No global random state is used anywhere.
"""

from __future__ import annotations

import hashlib

import torch


def derived_seed(seed: int, *path: str | int) -> int:
    """A 63-bit seed for the use named by `path`, for example `derived_seed(1, "rollout", iteration, row)`."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *path: str | int) -> torch.Generator:
    """A CPU generator seeded with `derived_seed`."""
    return torch.Generator().manual_seed(derived_seed(seed, *path))
