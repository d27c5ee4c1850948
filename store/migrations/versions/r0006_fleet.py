"""Workers that are drained by request and what GPUs they have; notes of runs; folders of deleted runs."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    devices = sa.Column("devices", postgresql.JSONB(), server_default=sa.text("'[]'::jsonb"), nullable=False)
    op.add_column("workers", devices)
    op.add_column("workers", sa.Column("drain_asked_by", sa.Text(), nullable=True))
    op.add_column("workers", sa.Column("drain_asked_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("runs", sa.Column("notes", sa.Text(), nullable=True))
    op.create_table(
        "deleted_runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("deleted_by", sa.Text(), nullable=True),
        sa.Column("deleted_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )


def downgrade() -> None:
    op.drop_table("deleted_runs")
    op.drop_column("runs", "notes")
    op.drop_column("workers", "drain_asked_at")
    op.drop_column("workers", "drain_asked_by")
    op.drop_column("workers", "devices")
