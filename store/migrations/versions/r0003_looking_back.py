"""Indexes for what is asked whenever checkpoints are listed: who starts from one, and what a trainer loaded."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("segments_started_from", "segments", ["start_checkpoint"])
    op.create_index("events_started", "events", ["run_id", "seq"], postgresql_where=sa.text("type = 'started'"))


def downgrade() -> None:
    op.drop_index("events_started", "events")
    op.drop_index("segments_started_from", "segments")
