"""Alembic's entry: runs revisions on the connection that `store.migrate` holds, and on nothing else."""

from alembic import context

from store.models import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
# The caller owns the transaction: it also holds the lock.
context.run_migrations()
