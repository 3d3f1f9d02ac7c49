"""The tables of files and batches, which a new database has from `tables`."""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None: ...
