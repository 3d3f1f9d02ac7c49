"""Engine process without a model: the real core, steps in real time, and output that repeats the prompt.

    python simulated_engine.py TOKENIZER_FOLDER STEP_SECONDS BLOCKS CONTEXT < setup.json

The output repeats the prompt. After three tokens a request of `HOPELESS` priority fails for lack of memory, and one of
`POISON` priority kills the process. While a request of `STUCK` priority exists, no step is planned.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tiny_model import EOS, VOCAB

from skipjoin.adapters import Adapter
from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event, Token
from skipjoin.core.forecast import Forecast
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import DEFAULT_OPTIONS, FinishReason, Request, RequestOptions
from skipjoin.core.step import StepPlan, StepResult
from skipjoin.model.errors import AdapterError, ModelError
from skipjoin.policies.cost import LinearCost
from skipjoin.recipes import EngineLimits, Settings, build
from skipjoin.sampling import SamplingParams, TokenDetail, TokenLogprob
from skipjoin.server.engines.engine_server import OnProgress, serve_engine
from skipjoin.server.engines.messages import Ready, Setup

BLOCK_SIZE = 16
HOPELESS, POISON, STUCK = 99, 98, 97
OUT_OF_MEMORY = "there was no memory for this request"
COST = LinearCost(floor=0.01, prefill_token=1e-5)


def _alternatives(count: int | None) -> tuple[tuple[int, float], ...]:
    return tuple((token, -1.0 - token) for token in range(count or 0))


class SimulatedLoop:
    """`skipjoin.engine.loop.EngineLoop` that sleeps instead of computing."""

    def __init__(self, setup: Setup, step_s: float, blocks: int, context: int) -> None:
        config = setup.config
        settings = Settings(
            COST,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            fair_output_weight=config.fair_output_weight,
            limits=EngineLimits(
                requests=None,
                max_len=context,
                device_blocks=blocks,
                cpu_blocks=0,
                block_size=BLOCK_SIZE,
                depth=1,
            ),
        )
        self.core = EngineCore(Scheduler(build(config.recipe, settings), KVLedger(blocks, 0, BLOCK_SIZE)))
        self.on_plan: Callable[[StepPlan], object] = lambda plan: None
        self.adapter_bytes: Counter[int] = Counter()
        self._plan: StepPlan | None = None
        self._step_s = step_s

    def add(
        self,
        request_id: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        options: RequestOptions = DEFAULT_OPTIONS,
        forecast: Forecast | None = None,
        output: Sequence[int] = (),
        age_s: float = 0.0,
    ) -> None:
        now = time.monotonic()
        eos = frozenset() if params.ignore_eos else frozenset([EOS])
        is_scored = params.prompt_logprobs is not None
        request = Request(
            request_id,
            now - age_s,
            prompt,
            params.output_limit,
            min_tokens=params.min_tokens,
            stop_tokens=frozenset(params.stop_token_ids) | eos,
            options=options,
            sampling=params,
            prefix=None if is_scored else ContentPrefix(BLOCK_SIZE, options.kv_salt),
            resumed=output,
        )
        request.progress.expect(forecast)
        self.core.add(request, now)

    def reforecast(self, request_id: int, forecast: Forecast) -> bool:
        return self.core.reforecast(request_id, forecast, time.monotonic())

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> bool:
        return self.core.abort(request_id, time.monotonic(), reason)

    def load_adapter(self, adapter: Adapter) -> None:
        if not Path(adapter.folder).is_dir():
            raise AdapterError(f"adapter {adapter.name}: {adapter.folder} is not a folder")
        self.adapter_bytes[adapter.number] = 1

    def unload_adapter(self, number: int) -> None:
        self.adapter_bytes.pop(number, None)

    @property
    def cost(self) -> LinearCost:
        return COST

    @property
    def between_steps_s(self) -> float:
        return 0.0

    @property
    def idle(self) -> bool:
        return not self.core.requests and self._plan is None

    def calibrate(self) -> bool:
        return False

    def submit(self) -> None:
        if any(request.options.priority == STUCK for request in self.core.requests.values()):
            return
        if self._plan is None and (plan := self.core.start_step(time.monotonic())) is not None:
            self.on_plan(plan)
            self._plan = plan

    def step(self) -> list[Event]:
        self.submit()
        plan, self._plan = self._plan, None
        if plan is not None:
            time.sleep(self._step_s)
            if any(_fails_now(part.request, POISON) for part in plan.slices):
                os.kill(os.getpid(), signal.SIGKILL)
            failed = {
                index: OUT_OF_MEMORY for index, part in enumerate(plan.slices) if _fails_now(part.request, HOPELESS)
            }
            tokens = [
                _sample(part.request) if part.samples and index not in failed else None
                for index, part in enumerate(plan.slices)
            ]
            self.core.finish_step(StepResult(plan, tokens, self._step_s, dropped=failed), time.monotonic())
            self.core.scheduler.kv.check()
        return [_with_detail(event) for event in self.core.take_events()]

    def close(self) -> None:
        pass


def _sample(request: Request) -> int:
    return request.prompt[len(request.progress.output) % len(request.prompt)]


def _fails_now(request: Request, priority: int) -> bool:
    return request.options.priority == priority and len(request.progress.output) == 3


def _with_detail(event: Event) -> Event:
    if not isinstance(event, Token):
        return event
    params, prompt = event.request.sampling, event.request.prompt
    assert isinstance(params, SamplingParams)
    if params.logprobs is None:
        return event
    scores: tuple[TokenLogprob, ...] = ()
    if params.prompt_logprobs is not None and len(event.request.progress.output) == 1:
        later = [TokenLogprob(token, -0.25, _alternatives(params.prompt_logprobs)) for token in prompt[1:]]
        scores = (TokenLogprob(prompt[0], None), *later)
    return event._replace(detail=TokenDetail(TokenLogprob(event.token, -0.5, _alternatives(params.logprobs)), scores))


def main() -> int:
    folder, step_s, blocks, context = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

    def load(setup: Setup, on_progress: OnProgress) -> tuple[SimulatedLoop, Ready]:
        if not Path(folder).is_dir():
            raise ModelError(f"there is no folder {folder}")
        on_progress("pretending to load", 1.0)
        config = setup.config
        ready = Ready(
            model="tiny",
            folder=folder,
            max_model_len=context,
            vocab_size=VOCAB,
            device_blocks=blocks,
            cpu_blocks=0,
            block_size=BLOCK_SIZE,
            block_bytes=1024,
            cpu_block_bytes=1024,
            swap_dtype="auto",
            recipe=config.recipe,
            dtype="none",
            device="none",
            cost=COST,
        )
        return SimulatedLoop(setup, step_s, blocks, context), ready

    return serve_engine(load)


if __name__ == "__main__":
    sys.exit(main())
