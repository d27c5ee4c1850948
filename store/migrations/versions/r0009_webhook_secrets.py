"""Earlier secrets of webhooks, which sign beside the present one for a while."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    secrets = sa.Column("old_secrets", postgresql.JSONB(), server_default=sa.text("'[]'::jsonb"), nullable=False)
    op.add_column("webhooks", secrets)


def downgrade() -> None:
    op.drop_column("webhooks", "old_secrets")
