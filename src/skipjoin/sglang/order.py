from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from skipjoin.options import ConfigError
from skipjoin.recipes import find
from skipjoin.recipes.adaptive import AdaptiveParams

# Environment variable that names the order, as SGLang's plugins have no options.
VARIABLE = "SKIPJOIN_SGLANG"
_PARAMETER = "prompt_patience"


@dataclass(frozen=True, slots=True)
class FirstTokenOrder:
    """`adaptive`'s order of requests that wait for their first token: by arrival + patience x prefill.

    The clock is SGLang's count of prefilled tokens, which is equal on all ranks. A request is overtaken by none that
    arrives after `patience` times its own uncached tokens were prefilled. Retracted requests have produced output, and
    keep the place of their return.
    """

    patience: float

    def sort(self, waiting: list[Any], deferred: Collection[str]) -> None:
        """Sort SGLang's requests in place; `deferred` are ids of those whose prefix another one will compute."""
        waiting.sort(key=lambda request: (request.rid in deferred, self._place(request)))

    def _place(self, request: Any) -> float:
        uncached = 0 if request.output_ids else len(request.origin_input_ids) - request.num_matched_prefix_tokens
        return float(request.arrival_processed_tokens + self.patience * max(0, uncached))


def order_of(name: str) -> FirstTokenOrder:
    """Return the order of a recipe such as "adaptive[prompt_patience=100]". Raise `ConfigError` for any other."""
    try:
        recipe = find(name)
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}: {error}") from error
    if recipe.params is not AdaptiveParams:
        raise ConfigError(
            f"{VARIABLE} must be adaptive, got {name!r}: SGLang's hooks order requests that wait and stop none that "
            "runs, which other recipes need; use them inside vLLM or in Skipjoin's server"
        )
    if without := next((name for name in recipe.fixed if name != _PARAMETER), None):
        raise ConfigError(f"{VARIABLE}: {without} has no effect inside SGLang: set {_PARAMETER} alone")
    params = recipe.read({})
    assert isinstance(params, AdaptiveParams)
    return FirstTokenOrder(params.prompt_patience)
