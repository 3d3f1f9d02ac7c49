"""vLLM's scheduler under Skipjoin's planner.

The planner decides over a ledger of block counts, and vLLM's own `schedule` carries the plan out: before the call,
`running` and the waiting queues hold the requests of the plan and no others. What vLLM really scheduled then replaces
the slices of the plan (`Scheduler.amend` of the core), so errors of the ledger correct themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Slice, StepPlan, StepResult, StepShape
from skipjoin.vllm.compat import check_features, check_kv_groups
from skipjoin.vllm.forecasts import LengthForecasts
from skipjoin.vllm.metrics import EngineCollector, Tally, serve_metrics
from skipjoin.vllm.moves import KvMoves
from skipjoin.vllm.options import read_options
from skipjoin.vllm.planning import describe, make_core, make_ledger
from skipjoin.vllm.queues import Store
from skipjoin.vllm.releases import CAN_CUT_PROMPTS, VERSION, AnyScheduler
from skipjoin.vllm.requests import finish_reason, take_tokens, twin_of

logger = init_logger("vllm.skipjoin")


class Flight(NamedTuple):
    """Step that vLLM runs.

    Attributes:
        is_planned: Whether the core has a plan for it. It has none while vLLM is paused, and for empty steps.
        since: Time of dispatch.
    """

    output: SchedulerOutput
    is_planned: bool
    since: float


class Scheduler(AnyScheduler):
    """Scheduler of vLLM that runs a recipe of Skipjoin.

    Attributes:
        clock: Monotonic seconds; tests and benchmarks replace it.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        check_features(config)
        check_kv_groups(self.kv_cache_config)
        options = read_options(config.additional_config)
        # The planner admits requests and cuts prompts, so vLLM must not require room for whole prompts.
        self.scheduler_reserve_full_isl = False
        self.waiting, self.kv_holding_waiting = Store(), Store()
        (group,) = self.kv_cache_config.kv_cache_groups
        self._ledger, self._cost = make_ledger(self.kv_cache_manager, group, self.connector)
        self._core = make_core(options, config, self._ledger, self._cost)
        tiers = self._ledger.tiers
        self._moves = KvMoves(self, tiers, self._drop) if tiers is not None else None
        # The copies of the tier are ordered with the steps, so blocks may be reused at once.
        self.defer_block_free = False
        self._twins: dict[str, Request] = {}  # by vLLM's id
        self._compiling: set[VllmRequest] = set()  # their grammar is not ready
        self._numbers = count()
        self._flights: deque[Flight] = deque()
        self._cuts: dict[str, int] = {}  # tokens of the slices that end before the last known token
        self._max_tokens = self.max_num_scheduled_tokens
        self._is_in_schedule = False
        self._lost: list[VllmRequest] = []  # preempted by vLLM while it carried the plan out
        self._last_result = self.clock()
        self._forecasts = LengthForecasts.open(options.forecasts, config.model_config.model)
        self.tally = Tally()
        collector = EngineCollector(self._core, self._twins, self.tally, recipe=options.recipe, vllm_version=VERSION)
        self._stop_metrics = serve_metrics(collector, options, config.parallel_config.data_parallel_index)
        logger.info("%s", describe(options, self._core, VERSION))

    # -- requests -----------------------------------------------------------------------------------------

    def add_request(self, request: VllmRequest) -> None:
        if request.resumable:
            # An exception would end the engine. The next `update_from_output` ends the request with an error.
            logger.error("the Skipjoin scheduler does not support streaming input: request %s", request.request_id)
            self.grammar_compile_error_reqs.add(request.request_id)
        super().add_request(request)
        if request.resumable or self._is_blocked_waiting_status(request.status):
            self._compiling.add(request)
        else:
            self._join(request)

    def _join(self, request: VllmRequest) -> None:
        now = self.clock()
        caches = bool(self.cache_config.enable_prefix_caching)
        twin = twin_of(request, next(self._numbers), now, max_model_len=self.max_model_len, caches=caches)
        self._twins[request.request_id] = twin
        if self._forecasts is not None:
            self._forecasts.arrived(twin)
        self._core.add(twin, now)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[VllmRequest]:
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._end(request, FinishReason.ABORT)
        return list(ended)

    def _end(self, request: Any, reason: FinishReason) -> None:
        self._compiling.discard(request)
        twin = self._twins.pop(request.request_id, None)
        if twin is None:
            return
        twin.finish_reason = reason
        self._core.remove(twin, self.clock())
        self._ledger.release(twin)  # vLLM frees the blocks at once, also those of requests in flight
        if self._forecasts is not None:
            self._forecasts.finished(twin)

    # -- a step -------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        begin = self.clock()
        self._join_compiled()
        plan = self._plan(begin)
        planned = self.clock()
        is_paused = self._pause_state is not PauseState.UNPAUSED
        joining = self._drain() if is_paused else self._enact(plan, begin)
        waiting, holding = self._swap_queues(joining)
        enacted = self.clock()
        self._is_in_schedule = True
        output = super().schedule(*args, **kwargs)
        self._is_in_schedule = False
        scheduled = self.clock()
        self._restore(waiting, holding, joining)
        if is_paused:
            plan = self._follow(output, scheduled)
        else:
            self._settle(plan, output, scheduled)
        self._flights.append(Flight(output, plan is not None, scheduled))
        tally = self.tally
        tally.steps += 1
        tally.plan_s += planned - begin
        tally.vllm_s += scheduled - enacted
        tally.other_s += enacted - planned + self.clock() - scheduled
        return output

    def _join_compiled(self) -> None:
        """Add requests whose grammar is compiled."""
        for request in list(self._compiling):
            if not request.resumable and self.is_ready(request):
                self._compiling.discard(request)
                self.deferred_waiting.discard(request)
                self.kv_holding_waiting.remove_request(request)
                self.waiting.add_request(request)
                self._join(request)

    def _plan(self, now: float) -> StepPlan | None:
        core = self._core
        if self._pause_state is not PauseState.UNPAUSED:
            return None  # vLLM drains the requests that hold KV, or runs nothing
        if self._forecasts is not None:
            for twin, forecast in self._forecasts.ready():
                if twin.finish_reason is None:
                    twin.forecast = forecast
                    for notify in core.policies.on_reforecast:
                        notify(twin, now)
        self._ledger.refresh()
        plan = core.schedule(now)
        for twin in self.tally.take(core.events):
            self._drop(twin.sampling, now)
        return plan

    def _drop(self, request: Any, now: float) -> None:
        """Let vLLM drop the KV that the plan takes from a request."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request in self.kv_holding_waiting:
            self.kv_holding_waiting.remove_request(request)
            request.status = RequestStatus.RUNNING  # vLLM preempts no others
        else:
            return  # it adopted a prefix in this plan, which vLLM has not given it yet
        super()._preempt_request(request, now)

    def _enact(self, plan: StepPlan | None, now: float) -> list[VllmRequest]:
        """Set `running` to the running requests of the plan, and return its other requests in order."""
        left = self._moves.begin(plan, now) if self._moves is not None and plan is not None else ()
        running: list[VllmRequest] = []
        joining: list[VllmRequest] = []
        cuts: dict[str, int] = {}
        for slice_ in plan.slices if plan is not None else ():
            request: Any = slice_.request.sampling
            if request in left:
                continue
            (running if request.status is RequestStatus.RUNNING else joining).append(request)
            if not slice_.samples:
                cuts[request.request_id] = slice_.tokens
        if len(running) < len(self.running):
            kept = set(running)
            for request in self.running:
                if request not in kept:
                    self._park(request)
        self.running, self._cuts = running, cuts
        if not CAN_CUT_PROMPTS and plan is not None:
            self.max_num_scheduled_tokens = sum(slice_.tokens for slice_ in plan.slices)
        return joining

    def _park(self, request: VllmRequest) -> None:
        """Take a request out of the batch with its KV. vLLM resumes it like a preempted one with computed tokens."""
        request.status = RequestStatus.PREEMPTED
        request.spec_token_ids = []
        self.kv_holding_waiting.add_request(request)
        self.reset_preempted_req_ids.add(request.request_id)  # the second model runner frees its slot

    def _drain(self) -> list[VllmRequest]:
        """Return the waiting requests that vLLM may run while it is paused. Only those with KV drain."""
        self._cuts, self.max_num_scheduled_tokens = {}, self._max_tokens
        tiers, twins = self._ledger.tiers, self._twins
        holding = list(self.kv_holding_waiting)
        return holding if tiers is None else [one for one in holding if not tiers.is_moving(twins[one.request_id])]

    def _swap_queues(self, joining: Sequence[VllmRequest]) -> tuple[Store, Store]:
        """Fill the queues with the joining requests only, and return the stores of all waiting requests."""
        waiting, holding = self.waiting, self.kv_holding_waiting
        self.kv_holding_waiting = FCFSRequestQueue(request for request in joining if request in holding)
        self.waiting = FCFSRequestQueue(request for request in joining if request in waiting)
        return waiting, holding

    def _restore(self, waiting: Store, holding: Store, joining: Sequence[VllmRequest]) -> None:
        """Restore the stores, without requests that joined and with requests that vLLM preempted."""
        self.waiting, self.kv_holding_waiting = waiting, holding
        for request in joining:
            if request.status is RequestStatus.RUNNING:
                waiting.remove_request(request)
                holding.remove_request(request)
        for request in self._lost:
            holding.remove_request(request)
            waiting.add_request(request)

    def _settle(self, plan: StepPlan | None, output: SchedulerOutput, now: float) -> None:
        """Report to the core which part of the plan vLLM scheduled."""
        scheduled, ledger = output.num_scheduled_tokens, self._ledger
        if plan is not None:
            done, is_exact = [], True
            for slice_ in plan.slices:
                request: Any = slice_.request.sampling
                tokens = scheduled.get(request.request_id, 0)
                start, samples = request.num_computed_tokens - tokens, not request.is_prefill_chunk
                if tokens == slice_.tokens and start == slice_.start and samples == slice_.samples:
                    done.append(slice_)
                    continue
                is_exact = False
                ledger.settle(slice_.request)
                if tokens:
                    done.append(Slice(slice_.request, start, tokens, samples, slice_.awaits, ()))
            if not is_exact:
                self.tally.amended += len(plan.slices) - len(done)
                self._core.amend(plan, done, now)
                self._core.events.clear()
            if plan.slices and not done and not self._lost:
                self._relieve(now)
        self._lose_all(now)

    def _follow(self, output: SchedulerOutput, now: float) -> StepPlan | None:
        """Report to the core what vLLM scheduled by itself, while it drains the requests that hold KV."""
        slices = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            twin = self._twins[request_id]
            request: Any = twin.sampling
            self._ledger.settle(twin)
            start, samples = request.num_computed_tokens - tokens, not request.is_prefill_chunk
            slices.append(Slice(twin, start, tokens, samples, start + tokens > twin.known, ()))
        self._lose_all(now)
        return self._core.insert(slices, now) if slices else None

    def _lose_all(self, now: float) -> None:
        for request in self._lost:
            self._lose(request, now)
        self._lost.clear()

    def _relieve(self, now: float) -> None:
        """Drop the KV of the lowest-ranked waiting request, after a step in which vLLM could schedule nothing."""
        if self._flights or not self.kv_holding_waiting:
            return
        rank = self._core.policies.ordering.rank
        worst = max(self.kv_holding_waiting, key=lambda one: rank(self._twins[one.request_id]))
        self._drop(worst, now)
        self._lose(worst, now)

    def _preempt_request(self, request: VllmRequest, *args: Any, **kwargs: Any) -> None:
        """Record a preemption by vLLM, because blocks were short or the cache is reset."""
        super()._preempt_request(request, *args, **kwargs)
        self.tally.preempted_by_vllm += 1
        if self._is_in_schedule:
            self._lost.append(request)
        else:
            self._lose(request, self.clock())

    def _lose(self, request: VllmRequest, now: float) -> None:
        if (twin := self._twins.get(request.request_id)) is not None:
            self._core.lose(twin, now)
            self._core.events.clear()

    def _reserve_prefill_lookahead(self, request: VllmRequest, computed: int, tokens: int) -> int:
        """Cut a prompt as the plan does. vLLM calls this last, with the number of tokens that it would run."""
        tokens = super()._reserve_prefill_lookahead(request, computed, tokens)
        return min(tokens, self._cuts.get(request.request_id, tokens)) if self._cuts else tokens

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        if reset_running_requests:  # parked requests hold KV, too
            for request in list(self.kv_holding_waiting):
                self.kv_holding_waiting.remove_request(request)
                request.status = RequestStatus.RUNNING
                self.running.append(request)
            for twin in [one for one in self._ledger.holders() if self._ledger.away(one)]:
                self._lose(twin.sampling, self.clock())
        return bool(super().reset_prefix_cache(reset_running_requests, *args, **kwargs))

    # -- results ------------------------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        arrived = self.clock()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        updated = self.clock()
        if self._flights and self._flights[0].output is scheduler_output:
            flight = self._flights.popleft()
            if flight.is_planned:
                self._commit(flight, arrived, updated)
            # The device runs steps back to back: this one began when the one before ended.
            self._last_result = arrived
            self._read_tokens(scheduler_output)
        self.tally.update_s += self.clock() - updated
        return outputs

    def _commit(self, flight: Flight, arrived: float, now: float) -> None:
        plan = self._core.in_flight[0]
        seconds = arrived - max(flight.since, self._last_result)
        if plan.slices:
            self._cost.learn(StepShape.of(plan.slices), seconds)
        leaving = self._moves.leaving(plan) if self._moves is not None else ()
        landed = (*plan.blocking, *plan.overlapped)
        self._core.commit(StepResult(plan, (None,) * len(plan.slices), seconds, landed=landed), now)
        self._core.events.clear()
        for twin in leaving:
            self._drop(twin.sampling, now)

    def _read_tokens(self, output: SchedulerOutput) -> None:
        """Take over the new tokens, and end the requests that are complete."""
        twins, requests = self._twins, self.requests
        for request_id in output.num_scheduled_tokens:
            if (twin := twins.get(request_id)) is not None:
                take_tokens(twin)
                if request_id not in requests:
                    self._end(twin.sampling, finish_reason(twin))

    def shutdown(self) -> None:
        logger.info("Skipjoin: %s", self.tally.described())
        if self._forecasts is not None:
            self._forecasts.close()
        if self._stop_metrics is not None:
            self._stop_metrics()
        super().shutdown()
