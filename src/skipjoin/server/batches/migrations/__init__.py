"""Alembic's scripts, which the store runs when it opens a database."""
