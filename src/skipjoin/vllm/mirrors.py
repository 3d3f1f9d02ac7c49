from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from skipjoin.core.foreign import ForeignScheduler
from skipjoin.core.request import FinishReason, Request
from skipjoin.vllm.forecasts import LengthForecasts
from skipjoin.vllm.histories import RequestHistories
from skipjoin.vllm.ledger import CountingLedger
from skipjoin.vllm.requests import finish_reason, mirror_of


class Mirrors(dict[str, Request]):
    def __init__(
        self,
        core: ForeignScheduler,
        ledger: CountingLedger,
        forecasts: LengthForecasts | None,
        histories: RequestHistories | None,
        *,
        max_model_len: int,
        caches: bool,
    ) -> None:
        super().__init__()
        self._core, self._ledger = core, ledger
        self._forecasts, self._histories = forecasts, histories
        self._max_model_len, self._caches = max_model_len, caches
        self._numbers = count()

    def join(self, request: Any, now: float, *, awaits_grammar: bool) -> None:
        mirror = mirror_of(request, next(self._numbers), now, max_model_len=self._max_model_len, caches=self._caches)
        mirror.progress.await_grammar(awaits_grammar)
        self[request.request_id] = mirror
        if self._forecasts is not None:
            self._forecasts.arrived(mirror)
        if self._histories is not None:
            self._histories.arrived(mirror, request.request_id, now)
        self._core.add(mirror, now)

    def end(self, request_id: str, reason: FinishReason, now: float) -> None:
        """Remove a request, if it is live. vLLM frees its blocks at once, also while it is in flight."""
        if (mirror := self.pop(request_id, None)) is None:
            return
        mirror.progress.finish(reason)
        self._core.remove(mirror, now)
        self._ledger.release(mirror)
        if self._forecasts is not None:
            self._forecasts.finished(mirror)
        if self._histories is not None:
            self._histories.finished(mirror, reason, now)

    def reforecast(self, now: float) -> None:
        for mirror, forecast in self._forecasts.ready() if self._forecasts is not None else ():
            if mirror.progress.finish_reason is None:
                mirror.progress.expect(forecast)
                for notify in self._core.policies.on_reforecast:
                    notify(mirror, now)

    def read(self, outputs: Mapping[int, Any], now: float) -> None:
        """Take over the new tokens of a step, `EngineCoreOutputs` by client, and end the requests that are complete."""
        histories = self._histories
        for client in outputs.values():
            for output in client.outputs:
                if (mirror := self.get(output.request_id)) is None:
                    continue
                new = output.new_token_ids
                is_first = histories is not None and not mirror.progress.output
                mirror.progress.extend(new)
                if is_first and new and histories is not None:
                    histories.generated(mirror, now)
                if output.finish_reason is not None:
                    self.end(output.request_id, finish_reason(mirror), now)
