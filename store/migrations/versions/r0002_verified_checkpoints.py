"""When a checkpoint was last found whole, and whether a removed one has left anything on disk."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("verified_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("checkpoints", sa.Column("files_gone", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.create_index(
        "checkpoints_going",
        "checkpoints",
        ["run_id"],
        postgresql_where=sa.text("status = 'removed' AND NOT files_gone"),
    )


def downgrade() -> None:
    op.drop_index("checkpoints_going", "checkpoints")
    op.drop_column("checkpoints", "files_gone")
    op.drop_column("checkpoints", "verified_at")
