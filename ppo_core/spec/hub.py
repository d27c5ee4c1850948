"""Data sets of the hub: how a spec names one, and which ones this server allows. It downloads nothing.

A download costs disk and brings in what nobody here has looked at, so none is allowed until whoever runs the server
lists it.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

ALLOWED = "PPO_HUB_DATASETS"  # the one setting; the same for api, worker and trainer
_PREFIX = "hub:"
_PLACE = re.compile(r"hub:([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([A-Za-z0-9]\w{0,63}))?", re.ASCII)


class HubDataset(NamedTuple):
    """A data set, `owner/name`, and the split of it that is meant."""

    name: str
    split: str


def is_hub(text: str) -> bool:
    """Whether a field's text names a data set of the hub and no path."""
    return text.startswith(_PREFIX)


def hub_dataset(text: str) -> HubDataset:
    """The data set that `hub:owner/name` or `hub:owner/name:split` names; the split is train where none is given.

    Raises:
        ValueError: it is not of that form, or not one that the server allows.
    """
    found = _PLACE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} names no data set of the hub; write hub:owner/name or hub:owner/name:split")
    allowed = [name.strip() for name in os.environ.get(ALLOWED, "").split(",") if name.strip()]
    if found[1] not in allowed:
        listed = ", ".join(allowed) or "none"
        raise ValueError(
            f"the data set {found[1]!r} is not one that this server fetches ({listed}); whoever runs it lists it in "
            f"{ALLOWED}, or give a file"
        )
    return HubDataset(found[1], found[2] or "train")
