"""What Postgres can hold of what a model wrote: the one written rule for odd text and non-finite numbers.

Text is data. JSONB and TEXT refuse NUL and lone surrogates, so NUL is kept as U+2400 (a picture of it) and a lone
surrogate as U+FFFD. JSON has no NaN: non-finite numbers become null.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_SURROGATE = re.compile(r"[\ud800-\udfff]")


def storable_text(text: str) -> str:
    """`text` without what Postgres refuses."""
    return _SURROGATE.sub("\ufffd", text.replace("\0", "\u2400"))


def storable_json(value: Any) -> Any:
    """`value` as strict JSON that JSONB takes: text by `storable_text`, non-finite numbers as null."""
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {storable_text(str(key)): storable_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable_json(item) for item in value]
    return value
