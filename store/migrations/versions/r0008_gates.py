"""The gates of a run are found without reading its whole history."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("events_gate", "events", ["run_id", "seq"], postgresql_where=sa.text("type = 'gate'"))


def downgrade() -> None:
    op.drop_index("events_gate", "events")
