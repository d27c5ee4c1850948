"""What a check before the first iteration found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """`detail` has the numbers; `remedy` says what to do, and is empty where nothing has to be done."""

    check: str
    status: Status
    detail: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
