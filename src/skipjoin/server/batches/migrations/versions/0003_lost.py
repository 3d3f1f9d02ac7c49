"""Add the number of engine crashes during a line."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("lines", sa.Column("lost", sa.Integer, nullable=False, server_default="0"))
