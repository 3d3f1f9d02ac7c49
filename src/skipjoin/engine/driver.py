"""One turn of an engine over an executor: fill the pipeline, wait for its oldest plan, commit it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from skipjoin.core.engine import EngineCore
from skipjoin.core.step import StepPlan, StepResult
from skipjoin.exec.base import Executor, Handle


class StepDriver:
    """Drives `core` over `executor`, with up to as many plans in flight as the scheduler allows.

    clock: seconds, monotonic; read before every plan, its submission and its commit. on_plan: called with a plan before
    it is submitted. on_result: called with a result before the core commits it.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        clock: Callable[[], float],
        on_result: Callable[[StepResult], object] = lambda result: None,
        on_plan: Callable[[StepPlan], object] = lambda plan: None,
    ) -> None:
        self.core = core
        self.executor = executor
        self.clock = clock
        self._on_result = on_result
        self._on_plan = on_plan
        self.in_flight: deque[Handle] = deque()

    def fill(self) -> None:
        """Submit all plans that can be made now. Raises what the executor raises, such as `RankError`."""
        while (plan := self.core.start_step(self.clock())) is not None:
            self._on_plan(plan)
            self.in_flight.append(self.executor.submit(plan, self.clock()))

    def turn(self) -> StepResult | None:
        """`fill`, then the result of the oldest plan, applied to the core; None where no plan is in flight and none can
        be made. Raises as `fill`."""
        self.fill()
        if not self.in_flight:
            return None
        result = self.in_flight.popleft().result()
        self._on_result(result)
        self.core.finish_step(result, self.clock())
        return result
