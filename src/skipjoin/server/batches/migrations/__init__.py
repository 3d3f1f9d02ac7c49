"""Alembic scripts, run when the store opens a database."""
