"""What every table is made of: the base class, and how Python types are kept."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import DateTime, Double, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase


class Base(DeclarativeBase):
    """All tables of PPO Control."""

    type_annotation_map = {  # noqa: RUF012
        str: Text,
        datetime: DateTime(timezone=True),
        float: Double,
        dict[str, Any]: JSONB,
        list[Any]: JSONB,
    }


def one_of(column: str, values: tuple[str, ...]) -> str:
    """The condition that `column` holds one of `values`."""
    return f"{column} IN ({', '.join(repr(value) for value in values)})"
