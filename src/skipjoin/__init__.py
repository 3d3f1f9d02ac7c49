"""Skipjoin: LLM serving with iteration-level preemption."""

from typing import TYPE_CHECKING, Any

from skipjoin.core.request import Target
from skipjoin.sampling import SamplingParams
from skipjoin.structured_output import StructuredOutput
from skipjoin.version import VERSION

if TYPE_CHECKING:
    from skipjoin.async_llm import AsyncLLM
    from skipjoin.llm import LLM

__version__ = VERSION
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutput", "Target", "__version__"]


def __getattr__(name: str) -> Any:
    # The core and the API process import this package; only an import of the engine loads torch.
    if name == "LLM":
        from skipjoin.llm import LLM  # noqa: PLC0415

        return LLM
    if name == "AsyncLLM":
        from skipjoin.async_llm import AsyncLLM  # noqa: PLC0415

        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
