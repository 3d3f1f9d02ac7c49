from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from skipjoin.adapters import Adapter
from skipjoin.core.events import Event
from skipjoin.core.forecast import Forecast
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import DEFAULT_OPTIONS, FinishReason, Request, RequestOptions
from skipjoin.core.step import StepPlan, StepResult, StepShape
from skipjoin.engine.build import Engine
from skipjoin.engine.driver import StepDriver
from skipjoin.engine.grammar_waits import GrammarWaits
from skipjoin.engine.rank_losses import RankLosses
from skipjoin.engine.step_times import StepTimes
from skipjoin.engine.targets import RelativeTargets
from skipjoin.exec.base import RankError
from skipjoin.exec.sampling import Sampling
from skipjoin.model.errors import AdapterError
from skipjoin.policies.cost import LinearCost
from skipjoin.sampling import ContextLengthError, ParameterError, SamplingParams, check_ids

_log = logging.getLogger(__name__)
# Maximum time that a step without a plan waits for a grammar.
_COMPILE_WAIT_S = 0.001


class EngineLoop:
    """Accepts requests and returns their events step by step. Not thread-safe: one thread owns it."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.core = engine.core
        self.clock = clock
        self._cost = engine.info.cost
        self._targets = None if engine.jct_scale is None else RelativeTargets(self._cost, engine.jct_scale)
        self.on_plan: Callable[[StepPlan], object] = lambda plan: None
        self._driver = StepDriver(engine.core, engine.executor, self.clock, self._learn, self._tell_plan)
        self._seeds = random.Random(engine.seed)
        self._running: deque[StepPlan] = deque()
        self._losses = RankLosses()
        self._times = StepTimes()
        self._compiling = GrammarWaits(engine.core, engine.executor, self.clock, self._charge)
        # Bytes of each adapter, on all ranks.
        self.adapter_bytes = Counter(engine.adapter_bytes)
        engine.core.on_finished = self._on_finished

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        options: RequestOptions = DEFAULT_OPTIONS,
        forecast: Forecast | None = None,
        output: Sequence[int] = (),
        age_s: float = 0.0,
    ) -> None:
        """Add a request, whose `params` must have a number as `max_tokens`.

        Args:
            output: Tokens that another engine has generated for it.
            age_s: Seconds since it arrived at the first engine, from which its deadline counts.

        Raises:
            ParameterError: If the prompt or `max_tokens` is invalid.
            RequestTooLargeError: If the KV pool cannot hold the request.
        """
        self.engine.info.check_pooling(params.pooling)
        self._check(prompt, params)
        if options.adapter and options.adapter not in self.adapter_bytes:
            raise ParameterError("model", "model names an adapter that is not loaded")
        if params.structured_outputs is not None and not self.engine.info.eos_token_ids:
            raise ParameterError(
                "structured_outputs",
                "structured_outputs needs a model with an end-of-sequence token, and this one has none",
            )
        now = self.clock()
        eos = self.engine.info.eos_token_ids
        # Where a grammar must end, end-of-sequence ends the output, whatever `ignore_eos` and `min_tokens` are.
        is_free = params.structured_outputs is None
        stop_tokens = frozenset(params.stop_token_ids)
        if not (params.ignore_eos and is_free):
            stop_tokens |= frozenset(eos)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        request = Request(
            request_id,
            now - age_s,
            prompt,
            params.output_limit,
            min_tokens=params.min_tokens if is_free else 0,
            stop_tokens=stop_tokens,
            options=options,
            sampling=Sampling(params, seed, eos),
            prefix=self._prefix(params, options),
            resumed=output,
        )
        request.progress.expect(forecast)
        if self._targets is not None:
            self._targets.arrived(request)
        self._compiling.add(request)
        try:
            self.core.add(request, now)
        except ValueError:
            self._on_finished(request)
            raise

    def reforecast(self, request_id: int, forecast: Forecast) -> bool:
        if self._targets is not None and (request := self.core.requests.get(request_id)) is not None:
            self._targets.reforecast(request, forecast)
        return self.core.reforecast(request_id, forecast, self.clock())

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> bool:
        return self.core.abort(request_id, self.clock(), reason)

    def load_adapter(self, adapter: Adapter) -> None:
        try:
            self.adapter_bytes[adapter.number] = self.engine.executor.load_adapter(adapter)
        except RankError as error:
            self._restart(error)
            raise AdapterError(f"adapter {adapter.name}: all ranks were restarted meanwhile: load it again") from error

    def unload_adapter(self, number: int) -> None:
        if self.adapter_bytes.pop(number, None) is not None:
            self.engine.executor.unload_adapter(number)

    @property
    def cost(self) -> LinearCost:
        """Cost model, as the steps of the last half hour were on average."""
        return self._times.matched(self._cost.current)

    @property
    def between_steps_s(self) -> float:
        return self._times.between_s

    @property
    def idle(self) -> bool:
        return not (self.core.requests or self._driver.in_flight or self.core.kv.is_moving)

    def submit(self) -> None:
        """Fill the pipeline, so that the caller can work while the model runs."""
        try:
            self._release_compiled()
            self._driver.fill()
        except RankError as error:
            self._restart(error)

    def step(self) -> list[Event]:
        """Commit the oldest plan and return its events. If a rank is lost, requests continue; see `RankLosses`."""
        try:
            self._release_compiled()
            if self.idle:
                self.engine.executor.check()
            result = self._driver.turn()
            if is_stuck := result is None:
                self._compiling.release(_COMPILE_WAIT_S)
            else:
                self._compiling.on_result(result)
            if is_stuck or self.idle:
                self._times.paused()
        except RankError as error:
            self._restart(error)
        events = self.core.take_events()
        if self._targets is not None:
            self._targets.observe(events)
        if self.engine.learned is not None:
            self.engine.learned.save_if_due()
        return events

    def calibrate(self) -> bool:
        """Measure the cost of a step; return False if the engine is busy, or all is measured."""
        calibration, kv = self.engine.calibration, self.core.scheduler.kv
        if calibration is None or not self.idle or not isinstance(kv, KVLedger) or not calibration.can_run(kv):
            return False
        try:
            found = calibration.run(kv, self._cost.current)
        except RankError as error:
            self._restart(error)
            return False
        except (RuntimeError, MemoryError, OSError) as error:  # such as no memory for the pools of transfers
            _log.warning("step costs are not measured, and follow the steps that run: %s", error)
            calibration.close()
            return False
        if found is not None:
            self._cost.restart(found)
        return True

    def _release_compiled(self) -> None:
        # While a plan is in flight, the next one is not due.
        if self._driver.in_flight:
            self._compiling.release()
        else:
            self._compiling.release_masks()

    def _on_finished(self, request: Request) -> None:
        self.engine.executor.on_finished(request)
        self._compiling.on_finished(request)

    def _charge(self, request: Request, seconds: float) -> None:
        """Count the time of a request's grammar and masks as if it had been spent on its tokens."""
        self.core.charge(request, seconds / self._cost.current.step(StepShape(decodes=1)), self.clock())

    def _restart(self, error: RankError) -> None:
        self._driver.in_flight.clear()
        self.core.restart(self.clock())
        if (blamed := self._losses.blame(self._running, error)) is not None:
            request, why = blamed
            self.core.abort(request.id, self.clock(), FinishReason.ERROR, why)
        self._running.clear()
        self.engine.executor.restart(error)
        self._compiling.restart()

    def _tell_plan(self, plan: StepPlan) -> None:
        self._running.append(plan)
        self._compiling.on_plan(plan.slices)
        self.on_plan(plan)

    def _learn(self, result: StepResult) -> None:
        self._running.popleft()
        # The time of a step that dropped slices is not that of its shape.
        if result.plan.slices and not result.dropped:
            shape, compute_s = StepShape.of(result.plan.slices), result.seconds - result.moving
            self._cost.learn(shape, compute_s)
            self._times.step_ended(self.clock(), result.seconds, compute_s, shape)
        else:
            self._times.paused()

    def close(self) -> None:
        if self.engine.calibration is not None:
            self.engine.calibration.close()
        if self.engine.learned is not None:
            self.engine.learned.close()
        self.engine.executor.close()

    def _prefix(self, params: SamplingParams, options: RequestOptions) -> ContentPrefix | None:
        """Return the prefix-cache keys; None with prompt logprobs, which need every token computed."""
        if not self.engine.caches_prefixes or params.prompt_logprobs is not None:
            return None
        return ContentPrefix(self.engine.info.block_size, options.kv_salt)

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        info, max_tokens = self.engine.info, params.output_limit
        if not prompt:
            raise ParameterError("prompt", "prompt must have at least 1 token")
        check_ids("prompt", prompt, info.vocab_size)
        params.check_ids(info.vocab_size)
        if params.pooling is not None:
            if len(prompt) > info.max_model_len:
                raise ContextLengthError.of_input("prompt", info.max_model_len, len(prompt))
            return
        left = info.max_model_len - len(prompt)
        if left < 1:
            raise ContextLengthError.of_prompt("prompt", info.max_model_len, len(prompt))
        if max_tokens > left:
            raise ContextLengthError.of_output("max_tokens", max_tokens, info.max_model_len, len(prompt))
