from __future__ import annotations

from collections import deque
from collections.abc import Callable

from skipjoin.core.engine import EngineCore
from skipjoin.core.step import StepPlan, StepResult
from skipjoin.exec.base import Executor, Handle


class StepDriver:
    def __init__(
        self,
        core: EngineCore,
        executor: Executor[Handle],
        clock: Callable[[], float],
        on_result: Callable[[StepResult], object] = lambda result: None,
        on_plan: Callable[[StepPlan], object] = lambda plan: None,
    ) -> None:
        self.core = core
        self.executor = executor
        core.on_finished = executor.on_finished
        self.clock = clock
        self._on_result = on_result
        self._on_plan = on_plan
        self.in_flight: deque[Handle] = deque()

    def fill(self) -> None:
        while (plan := self.core.start_step(self.clock())) is not None:
            self._on_plan(plan)
            self.in_flight.append(self.executor.submit(plan, self.clock()))

    def turn(self) -> StepResult | None:
        self.fill()
        if not self.in_flight:
            return None
        result = self.in_flight.popleft().result()
        self._on_result(result)
        self.core.finish_step(result, self.clock())
        return result
