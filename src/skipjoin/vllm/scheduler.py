"""vLLM's scheduler under Skipjoin's planner.

The planner decides over a ledger of block counts. vLLM's own `schedule` carries the plan out, with only its requests in
`running` and the waiting queues. What vLLM really scheduled then replaces the slices of the plan, so errors of the
ledger correct themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from skipjoin.core.request import FinishReason
from skipjoin.core.step import StepPlan, StepResult, StepShape
from skipjoin.vllm.batch import Batch, accepted, slice_of
from skipjoin.vllm.compat import GROUP, check_attributes, check_features, check_kv_groups
from skipjoin.vllm.forecasts import LengthForecasts
from skipjoin.vllm.listener import listen
from skipjoin.vllm.metrics import EngineCollector, Tally
from skipjoin.vllm.mirrors import Mirrors
from skipjoin.vllm.moves import KvMoves
from skipjoin.vllm.options import read_options
from skipjoin.vllm.planning import describe, make_core, make_histories, make_ledger
from skipjoin.vllm.queues import Store
from skipjoin.vllm.releases import CAN_CUT_PROMPTS, VERSION, AnyScheduler

logger = init_logger("vllm.skipjoin")
_NO_STREAMING = "the Skipjoin scheduler does not support streaming input"


class Flight(NamedTuple):
    """Step that vLLM runs. The core has no plan for it while vLLM is paused, and for empty steps."""

    output: SchedulerOutput
    is_planned: bool
    since: float


class Scheduler(AnyScheduler):
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        check_features(config)
        check_kv_groups(self.kv_cache_config, has_tier=self.connector is not None)
        for group in self.kv_cache_manager.coordinator.single_type_managers:
            check_attributes(group, GROUP, VERSION)
        options = read_options(config.additional_config)
        # The planner admits requests and cuts prompts, so vLLM must not require room for whole prompts.
        self.scheduler_reserve_full_isl = False
        self.waiting, self.kv_holding_waiting = Store(), Store()
        self._ledger, self._cost = make_ledger(self)
        self._core = make_core(options, config, self._ledger, self._cost)
        tiers = self._ledger.tiers
        self._moves = KvMoves(self, tiers, self._drop) if tiers is not None else None
        # The copies of the tier are ordered with the steps, so blocks may be reused at once.
        self.defer_block_free = False
        self._compiling: set[VllmRequest] = set()  # their grammar is not ready
        self._flights: deque[Flight] = deque()
        self._batch: Batch | None = None  # the latest one
        self._cuts: dict[str, int] = {}  # see `Batch`
        self._max_tokens = self.max_num_scheduled_tokens
        self._is_in_schedule = False
        self._lost: list[VllmRequest] = []  # preempted by vLLM while it carried the plan out
        self._last_result = self.clock()
        self._forecasts = LengthForecasts.open(options.forecasts, config.model_config.model)
        engine, caches = config.parallel_config.data_parallel_index, bool(self.cache_config.enable_prefix_caching)
        self._histories = make_histories(options, config, self._ledger, self.clock)
        self._mirrors = Mirrors(
            self._core, self._ledger, self._forecasts, self._histories, max_model_len=self.max_model_len, caches=caches
        )
        self.tally = Tally()
        collector = EngineCollector(self._core, self._mirrors, self.tally, recipe=options.recipe, vllm_version=VERSION)
        self._stop_listener = listen(collector, self._histories, options, engine)
        logger.info("%s", describe(options, self._core, VERSION))

    # -- requests -----------------------------------------------------------------------------------------

    def add_request(self, request: VllmRequest) -> None:
        if request.resumable:
            # An exception would end the engine. The next `update_from_output` ends the request with an error.
            logger.error("%s: request %s", _NO_STREAMING, request.request_id)
            self.fail_request(request.request_id, _NO_STREAMING)
        super().add_request(request)
        is_blocked = self._is_blocked_waiting_status(request.status)
        if request.resumable or is_blocked:
            self._compiling.add(request)
        if not request.resumable:
            self._mirrors.join(request, self.clock(), awaits_grammar=is_blocked)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[VllmRequest]:
        ended = super().finish_requests(request_ids, finished_status)
        now = self.clock()
        for request in ended:
            self._compiling.discard(request)
            self._mirrors.end(request.request_id, FinishReason.ABORT, now)
        return list(ended)

    # -- a step -------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        begin = self.clock()
        self._join_compiled()
        is_paused = self._pause_state is not PauseState.UNPAUSED
        # While it is paused, vLLM drains the requests that hold KV, or runs nothing.
        plan = None if is_paused else self._plan(begin)
        planned = self.clock()
        batch = self._enact(plan, begin) if plan is not None else None
        joining = batch.joining if batch is not None else self._drain() if is_paused else self._park_all()
        waiting, holding = self._swap_queues(joining)
        enacted = self.clock()
        self._is_in_schedule = True
        output = super().schedule(*args, **kwargs)
        self._is_in_schedule = False
        scheduled = self.clock()
        self._restore(waiting, holding, joining)
        if batch is not None:
            self._settle(batch, output, scheduled)
        for request in self._lost:
            self._lose(request, scheduled)
        self._lost.clear()
        if is_paused:
            plan = self._follow(output, scheduled)
        self._flights.append(Flight(output, plan is not None, scheduled))
        tally = self.tally
        tally.steps += 1
        tally.plan_s += planned - begin
        tally.vllm_s += scheduled - enacted
        tally.other_s += enacted - planned + self.clock() - scheduled
        return output

    def _join_compiled(self) -> None:
        for request in list(self._compiling):
            if not request.resumable and self.is_ready(request):
                self._compiling.discard(request)
                self.deferred_waiting.discard(request)
                self.kv_holding_waiting.remove_request(request)
                self.waiting.add_request(request)
                self._mirrors[request.request_id].progress.await_grammar(False)

    def _plan(self, now: float) -> StepPlan | None:
        core = self._core
        self._mirrors.reforecast(now)
        self._ledger.refresh()
        plan = core.schedule(now)
        if self._histories is not None:
            self._histories.observe(core.events)
            self._histories.answer(core.policies, core.kv)
        for mirror in self.tally.take(core.events):
            self._drop(mirror.sampling, now)
        return plan

    def _forget_events(self) -> None:
        """Pass on events of what vLLM reports, which are no preemptions by the planner."""
        if self._histories is not None:
            self._histories.observe(self._core.events)
        self._core.events.clear()

    def _drop(self, request: Any, now: float) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request in self.kv_holding_waiting:
            self.kv_holding_waiting.remove_request(request)
            request.status = RequestStatus.RUNNING  # vLLM preempts no others
        else:
            return  # it adopted a prefix in this plan, which vLLM has not given it yet
        super()._preempt_request(request, now)

    def _enact(self, plan: StepPlan, now: float) -> Batch:
        left = self._moves.begin(plan, now) if self._moves is not None else ()
        batch = self._batch = Batch(plan, left, self.running, self._batch)
        if len(batch.running) < len(self.running):
            kept = set(batch.running)
            for request in self.running:
                if request not in kept:
                    self._park(request)
        self.running = batch.running
        self._cut(batch.cuts)
        if not CAN_CUT_PROMPTS:
            drafts = sum(len(request.spec_token_ids) for request in batch.running)
            self.max_num_scheduled_tokens = sum(batch.tokens.values()) + drafts
        return batch

    def _park_all(self) -> list[VllmRequest]:
        for request in self.running:
            self._park(request)
        self.running = []
        self._cut({})
        return []

    def _park(self, request: VllmRequest) -> None:
        """Take a request out of the batch with its KV. vLLM resumes it like a preempted one with computed tokens."""
        request.status = RequestStatus.PREEMPTED
        request.spec_token_ids = []
        self._release_encoder_outputs(request)
        self.kv_holding_waiting.add_request(request)
        self.reset_preempted_req_ids.add(request.request_id)  # the second model runner frees its slot

    def _release_encoder_outputs(self, request: VllmRequest) -> None:
        """Let encoder outputs of a waiting request be evicted, or requests could wait for each other's room.

        Evicted ones are computed again.
        """
        if request.has_encoder_inputs:
            self.encoder_cache_manager.free(request)

    def _drain(self) -> list[VllmRequest]:
        """Return the waiting requests that vLLM may run while it is paused. Only those with KV drain."""
        self._cut({})
        self.max_num_scheduled_tokens = self._max_tokens
        tiers, mirrors = self._ledger.tiers, self._mirrors
        holding = list(self.kv_holding_waiting)
        return [request for request in holding if tiers is None or not tiers.is_moving(mirrors.get(request.request_id))]

    def _swap_queues(self, joining: Sequence[VllmRequest]) -> tuple[Store, Store]:
        """Fill the queues with the joining requests only, and return the stores of all waiting requests."""
        waiting, holding = self.waiting, self.kv_holding_waiting
        self.kv_holding_waiting = FCFSRequestQueue(request for request in joining if request in holding)
        self.waiting = FCFSRequestQueue(request for request in joining if request in waiting)
        return waiting, holding

    def _restore(self, waiting: Store, holding: Store, joining: Sequence[VllmRequest]) -> None:
        self.waiting, self.kv_holding_waiting = waiting, holding
        for request in joining:
            if request.status is RequestStatus.RUNNING:
                waiting.remove_request(request)
                holding.remove_request(request)
            else:
                self._release_encoder_outputs(request)
        for request in self._lost:
            holding.remove_request(request)
            waiting.add_request(request)

    def _settle(self, batch: Batch, output: SchedulerOutput, now: float) -> None:
        if batch.is_run_by(output.num_scheduled_tokens):
            self._ledger.follow(slice_.request for slice_ in batch.plan.slices)
            return
        done = []
        for slice_, made in batch.changes(output.num_scheduled_tokens):
            if made != slice_:
                self._ledger.settle(slice_.request)
            if made is not None:
                done.append(made)
        self.tally.amended += len(batch.plan.slices) - len(done)
        self._core.amend(batch.plan, done, now)
        self._forget_events()
        if batch.plan.slices and not done and not self._lost:
            self._relieve(now)

    def _follow(self, output: SchedulerOutput, now: float) -> StepPlan | None:
        """Report to the core what vLLM scheduled by itself, while it drains the requests that hold KV."""
        slices = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            mirror = self._mirrors[request_id]
            self._ledger.settle(mirror)
            made = slice_of(mirror, tokens, awaits=False)
            slices.append(made._replace(awaits=made.start + tokens > mirror.progress.known))
        return self._core.insert(slices, now) if slices else None

    def _relieve(self, now: float) -> None:
        """Drop the KV of the lowest-ranked waiting request, after a step in which vLLM could schedule nothing."""
        parked = [request for request in self.kv_holding_waiting if request.status is RequestStatus.PREEMPTED]
        if self._flights or not parked:
            return
        rank = self._core.policies.ordering.rank
        worst = max(parked, key=lambda request: rank(self._mirrors[request.request_id]))
        self._drop(worst, now)
        self._lose(worst, now)

    def _preempt_request(self, request: VllmRequest, *args: Any, **kwargs: Any) -> None:
        """Record a preemption by vLLM, for lack of blocks or because the cache is reset."""
        super()._preempt_request(request, *args, **kwargs)
        self.tally.preempted_by_vllm += 1
        if self._is_in_schedule:
            self._lost.append(request)
        else:
            self._lose(request, self.clock())

    def _lose(self, request: VllmRequest, now: float) -> None:
        if (mirror := self._mirrors.get(request.request_id)) is not None:
            self._core.lose(mirror, now)
            self._forget_events()

    def _cut(self, cuts: dict[str, int]) -> None:
        self._cuts = cuts
        # vLLM calls this for each request, so the method is replaced only in steps that cut prompts.
        if cuts:
            self._reserve_prefill_lookahead = self._reserve_cut
        else:
            self.__dict__.pop("_reserve_prefill_lookahead", None)

    def _reserve_cut(self, request: VllmRequest, computed: int, tokens: int) -> int:
        tokens = super()._reserve_prefill_lookahead(request, computed, tokens)
        return min(tokens, self._cuts.get(request.request_id, tokens))

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        if reset_running_requests:  # parked requests hold KV, too
            for request in [
                request for request in self.kv_holding_waiting if request.status is RequestStatus.PREEMPTED
            ]:
                self.kv_holding_waiting.remove_request(request)
                request.status = RequestStatus.RUNNING
                self.running.append(request)
            for mirror in [holder for holder in self._ledger.holders() if self._ledger.swapped_out(holder)]:
                self._lose(mirror.sampling, self.clock())
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
            self._mirrors.read(outputs, updated)
        self.tally.update_s += self.clock() - updated
        return outputs

    def _commit(self, flight: Flight, arrived: float, now: float) -> None:
        plan = self._core.in_flight[0]
        seconds = arrived - max(flight.since, self._last_result)
        if plan.slices:
            self._cost.learn(StepShape.of(plan.slices), seconds)
        if flight.output.scheduled_spec_decode_tokens:
            plan = self._core.amend(plan, [*map(accepted, plan.slices)], now)
        leaving = self._moves.leaving(plan) if self._moves is not None else ()
        completed = (*plan.blocking, *plan.overlapped)
        self._core.commit(StepResult(plan, (None,) * len(plan.slices), seconds, completed=completed), now)
        self._forget_events()
        for mirror in leaving:
            self._drop(mirror.sampling, now)

    def shutdown(self) -> None:
        logger.info("Skipjoin: %s", self.tally.described())
        if self._forecasts is not None:
            self._forecasts.close()
        if self._stop_listener is not None:
            self._stop_listener()
        super().shutdown()
