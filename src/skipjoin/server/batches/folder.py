"""Where files and batches are kept."""

from __future__ import annotations

import os
from pathlib import Path

from skipjoin.config import NOWHERE, ServerConfig
from skipjoin.system.folders import cache_folder

# Environment variable with the folder of servers that are given none; "none": they have no batches.
FOLDER_VARIABLE = "SKIPJOIN_BATCH_DIR"


def batch_folder(config: ServerConfig) -> Path | None:
    """The folder of a server's files and batches: the one of its configuration or else $SKIPJOIN_BATCH_DIR, or else
    skipjoin/batches in the user's cache folder. None: it has none."""
    named = config.batch_dir or os.environ.get(FOLDER_VARIABLE)
    if named == NOWHERE:
        return None
    if named:
        return Path(named)
    return cache_folder() / "batches"
