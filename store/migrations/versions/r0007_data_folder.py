"""Which folder is the platform's data folder, and what is wrong with the one that a worker sees."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("folder_fault", sa.Text(), nullable=True))
    op.create_table(
        "data_folder",
        sa.Column("id", sa.SmallInteger(), server_default="1", autoincrement=False, nullable=False),
        sa.Column("folder_id", sa.Text(), nullable=False),
        sa.Column("named_by", sa.Text(), nullable=False),
        sa.Column("named_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("id = 1", name="data_folder_one_row"),
    )


def downgrade() -> None:
    op.drop_table("data_folder")
    op.drop_column("workers", "folder_fault")
