"""The platform's own alert rules, one row."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "alert_rules",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("alerts", postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("version", sa.Integer(), server_default="0", nullable=False),
        sa.Column("changed_by", sa.Text(), nullable=True),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("id = 1", name="alert_rules_one_row"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.execute("INSERT INTO alert_rules (id) VALUES (1)")


def downgrade() -> None:
    op.drop_table("alert_rules")
