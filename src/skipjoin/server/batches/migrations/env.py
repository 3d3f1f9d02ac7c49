from __future__ import annotations

from alembic import context

from skipjoin.server.batches.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
