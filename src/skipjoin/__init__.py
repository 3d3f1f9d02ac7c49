"""Skipjoin: LLM serving with iteration-level preemption."""

# Names are imported when they are asked for, so that an import loads no torch, and an interrupted command has no
# traceback. `typing` alone would take a third of the time of an import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from skipjoin.async_llm import AsyncLLM
    from skipjoin.core.request import Target
    from skipjoin.llm import LLM
    from skipjoin.sampling import SamplingParams
    from skipjoin.structured_output import StructuredOutput

    __version__: str

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutput", "Target", "__version__"]

_PLACES = {
    "LLM": ("skipjoin.llm", "LLM"),
    "AsyncLLM": ("skipjoin.async_llm", "AsyncLLM"),
    "SamplingParams": ("skipjoin.sampling", "SamplingParams"),
    "StructuredOutput": ("skipjoin.structured_output", "StructuredOutput"),
    "Target": ("skipjoin.core.request", "Target"),
    "__version__": ("skipjoin.version", "VERSION"),
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    module, attribute = _PLACES[name]
    try:
        found = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        from skipjoin.extras import why_not_found  # noqa: PLC0415

        if (why := why_not_found(error, f"skipjoin.{name}")) is None:
            raise
        raise ModuleNotFoundError(why, name=error.name) from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
