from __future__ import annotations

import os
from pathlib import Path

from skipjoin.config import NOWHERE, ServerConfig
from skipjoin.system.folders import cache_folder

# Environment variable with the default folder. "none" disables batches.
FOLDER_VARIABLE = "SKIPJOIN_BATCH_DIR"


def batch_folder(config: ServerConfig) -> Path | None:
    named = config.batch_dir or os.environ.get(FOLDER_VARIABLE)
    if named == NOWHERE:
        return None
    if named:
        return Path(named)
    return cache_folder() / "batches"


def is_named(config: ServerConfig) -> bool:
    return config.batch_db is not None or (config.batch_dir or os.environ.get(FOLDER_VARIABLE) or NOWHERE) != NOWHERE
