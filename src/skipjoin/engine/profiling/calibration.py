from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from skipjoin.config import ConfigError
from skipjoin.config.profile import Profile, Transfer, cache_profile, cached_profile, measures_alone
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.step import Direction, StepShape
from skipjoin.engine.load import Loaded
from skipjoin.engine.profiling.cases import Limits
from skipjoin.engine.profiling.profiler import FIRST_START, Measurement, used_blocks
from skipjoin.policies.cost import LinearCost

_log = logging.getLogger(__name__)
# Expected duration of the longest steps that are measured. A request that arrives meanwhile waits for one of them.
_LONGEST_S = 0.5
_TRANSFER_S = 0.2


class Calibration:
    """Measures step costs while an engine is idle, and keeps them for the next start.

    `before` is a profile with a poor fit, which is replaced by a better one.
    """

    def __init__(
        self,
        loaded: Loaded,
        limits: Limits,
        cost_of: Callable[[Profile], LinearCost],
        *,
        host_s: float,
        before: Profile | None = None,
    ) -> None:
        self._loaded, self._limits, self._cost_of = loaded, limits, cost_of
        self._host_s, self._before = host_s, before
        self._lock = ExitStack()
        self._measurement: Measurement | None = None
        self._transfers: Mapping[Direction, Transfer] | None = None
        self._is_done = self._is_locked = False

    def can_run(self, kv: KVLedger) -> bool:
        """Return False if all is measured, if too few blocks are empty, or while another engine measures."""
        if self._is_done or kv.device.empty < kv.blocks_for(self._limits.positions):
            return False
        if not self._is_locked:
            try:
                self._lock.enter_context(measures_alone(self._loaded.key))
            except BlockingIOError:
                return False
            self._is_locked = True
        return True

    def run(self, kv: KVLedger, cost: LinearCost) -> LinearCost | None:
        """Run one step in blocks that hold nothing; return the cost model after the last, unless its fit is poor."""
        loaded, executor = self._loaded, self._loaded.executor
        if self._measurement is None:
            if (found := cached_profile(loaded.key)) is not None and found != self._before:
                return self._end(found)  # by an engine that started together with this one
            self._measurement = Measurement(executor, _short(self._limits, cost), FIRST_START)
        if self._transfers is None:
            self._transfers = executor.transfers(_TRANSFER_S)
            return None
        self._measurement.run(kv.device.next_empty(used_blocks(executor, self._limits)))
        if not self._measurement.is_done:
            return None
        profile = self._measurement.profile(loaded.config, loaded.key, self._transfers, self._host_s)
        _log.info("step costs are measured: %s", fit(profile))
        if self._before is None or profile.errors.median < self._before.errors.median:
            _cache(profile)
        return self._end(profile)

    def close(self) -> None:
        self._is_done = True
        self._lock.close()

    def _end(self, profile: Profile) -> LinearCost | None:
        self.close()
        return None if profile.is_poor else self._cost_of(profile)


def _short(limits: Limits, cost: LinearCost) -> Limits:
    """Return limits of steps that take about `_LONGEST_S`, or twice as long as the smallest."""
    left = max(_LONGEST_S - cost.step(StepShape(decodes=1)), cost.step(StepShape(decodes=1))) / 2
    tokens = math.isqrt(int(2 * left / max(cost.attention_pair, 1e-15)))
    tokens = max(2, min(limits.tokens, tokens, int(left / max(cost.prefill_token, 1e-15))))
    kv_tokens = int(left / max(cost.context_token, cost.attention_pair * tokens, 1e-15))
    kv_tokens = max(tokens + 1, min(limits.kv_tokens, kv_tokens))
    requests = max(1, min(limits.requests, int(left / max(cost.decode, 1e-15))))
    return Limits(tokens, requests, min(limits.positions, kv_tokens), kv_tokens, limits.vocab_size)


def fit(profile: Profile) -> str:
    errors = profile.errors
    text = f"median error {errors.median:.0%}"
    return f"{text}, because other programs use this machine, or its speed varies" if profile.is_poor else text


def _cache(profile: Profile) -> None:
    try:
        cache_profile(profile)
    except ConfigError as error:
        _log.warning("the profile cannot be cached, so the next start measures steps again: %s", error)
