"""The table of the platform's own alert rules: one row, which the migration makes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, Integer, SmallInteger, text
from sqlalchemy.orm import Mapped, mapped_column

from store.base import Base


class AlertRules(Base):
    """What every submitted spec takes for the fields of its `alerts` group that it leaves out."""

    __tablename__ = "alert_rules"
    __table_args__ = (CheckConstraint("id = 1", name="alert_rules_one_row"),)

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    alerts: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))  # a partial group, no defaults
    version: Mapped[int] = mapped_column(Integer, server_default="0")  # ETag; rises with every change
    changed_by: Mapped[str | None]
    changed_at: Mapped[datetime | None]
