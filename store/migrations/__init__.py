"""Alembic's scripts, inside the package so that an installed copy can migrate too."""
