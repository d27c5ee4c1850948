"""Alerts of runs, and webhooks with what was sent to them."""

from datetime import datetime

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def _time(name: str, *, optional: bool = False, now: bool = False) -> sa.Column[datetime]:
    default = sa.text("now()") if now else None
    return sa.Column(name, sa.DateTime(timezone=True), server_default=default, nullable=optional)


def _text(name: str, *, optional: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=optional)


def upgrade() -> None:
    op.create_index("events_preflight", "events", ["run_id", "seq"], postgresql_where=sa.text("type = 'preflight'"))
    op.create_table(
        "alerts",
        _text("id"),
        _text("run_id"),
        sa.Column("segment", sa.Integer(), nullable=False),
        *(
            _text(name)
            for name in ("key", "rule", "kind", "status", "severity", "title", "detail", "meaning", "remedy")
        ),
        sa.Column("metrics", postgresql.JSONB(), nullable=False),
        sa.Column("iteration", sa.Integer(), nullable=False),
        sa.Column("onset", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=True) for name in ("value", "baseline", "bound")),
        sa.Column("evidence", postgresql.JSONB(), nullable=False),
        sa.Column("snapshot", postgresql.JSONB(), nullable=False),
        _text("action"),
        sa.Column("suggestion", postgresql.JSONB(), nullable=True),
        sa.Column("changes", postgresql.JSONB(), nullable=False),
        _time("raised_at"),
        _time("cleared_at", optional=True),
        sa.Column("cleared_iteration", sa.Integer(), nullable=True),
        _time("acknowledged_at", optional=True),
        _text("acknowledged_by", optional=True),
        _time("snoozed_until", optional=True),
        _text("snoozed_by", optional=True),
        sa.CheckConstraint("status IN ('open', 'cleared', 'left')", name="alerts_status_known"),
        sa.CheckConstraint("severity IN ('warning', 'critical')", name="alerts_severity_known"),
        sa.ForeignKeyConstraint(["run_id", "segment"], ["segments.run_id", "segments.number"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "segment", "key"),
    )
    op.create_index("alerts_open", "alerts", ["run_id"], postgresql_where=sa.text("status = 'open'"))
    op.create_index("alerts_newest", "alerts", [sa.text("raised_at DESC"), sa.text("id DESC")])
    op.create_table(
        "webhooks",
        *(_text(name) for name in ("id", "name", "url", "secret")),
        sa.Column("events", postgresql.JSONB(), nullable=False),
        sa.Column("enabled", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        _text("disabled_reason", optional=True),
        _text("created_by", optional=True),
        _time("created_at", now=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "webhook_events",
        _text("id"),
        _text("type"),
        _time("time", now=True),
        sa.Column("data", postgresql.JSONB(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("webhook_events_time", "webhook_events", ["time"])
    op.create_table(
        "webhook_deliveries",
        *(_text(name) for name in ("id", "webhook_id", "event_id")),
        sa.Column("status", sa.Text(), server_default="pending", nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        _time("next_attempt_at", now=True),
        sa.Column("last_status", sa.Integer(), nullable=True),
        _text("last_error", optional=True),
        _time("created_at", now=True),
        _time("finished_at", optional=True),
        sa.CheckConstraint("status IN ('pending', 'delivered', 'dead')", name="webhook_deliveries_status_known"),
        sa.ForeignKeyConstraint(["webhook_id"], ["webhooks.id"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["event_id"], ["webhook_events.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("webhook_id", "event_id"),
    )
    pending = sa.text("status = 'pending'")
    op.create_index("webhook_deliveries_due", "webhook_deliveries", ["next_attempt_at"], postgresql_where=pending)
    op.create_index(
        "webhook_deliveries_newest",
        "webhook_deliveries",
        ["webhook_id", sa.text("created_at DESC"), sa.text("id DESC")],
    )
    op.create_index("webhook_deliveries_event", "webhook_deliveries", ["event_id"])


def downgrade() -> None:
    for table in ("webhook_deliveries", "webhook_events", "webhooks", "alerts"):
        op.drop_table(table)
    op.drop_index("events_preflight", "events")
