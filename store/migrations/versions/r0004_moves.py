"""The map of moves of today: a pause that timed out lets its run go on, and moves that nothing makes are gone."""

from alembic import op

from store.state_trigger import function_sql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(function_sql())


def downgrade() -> None:
    """Nothing: the function is generated from the map of the code that runs."""
