"""Messages between the API process and the engine processes, encoded as msgpack."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from skipjoin.adapters import Adapter
from skipjoin.config import HANG_LIMITS, EngineConfig, HangLimits
from skipjoin.core.forecast import Forecast
from skipjoin.core.policy import Fact
from skipjoin.core.request import DEFAULT_OPTIONS, FinishReason, Request, RequestOptions, ServiceClass
from skipjoin.kv_format import SWAP_FORMATS
from skipjoin.observe.competitors import Competitor
from skipjoin.observe.explanation import Standing
from skipjoin.observe.history import History, current_prediction
from skipjoin.observe.metric_snapshot import Snapshot
from skipjoin.observe.steps import StepSummary
from skipjoin.options import Value
from skipjoin.policies.cost import LinearCost
from skipjoin.pooling import Task
from skipjoin.sampling import SamplingParams, TokenDetail, TokenLogprob


class ListenerKey(msgspec.Struct, frozen=True):
    """Address and public key of the listener, and the engines' key pair, in Z85."""

    host: str
    port: int
    server: str
    public: str
    secret: str


class Setup(msgspec.Struct, frozen=True):
    """Input of an engine process, as JSON. `at` is the address of a local socket, or the key to a listener."""

    config: EngineConfig
    at: str | ListenerKey
    parent: int
    heartbeat_fd: int | None = None
    limits: HangLimits = HANG_LIMITS


# -- to the engine --------------------------------------------------------------------------------------------


class Add(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """Adds a request.

    Attributes:
        output: Tokens from another engine, after which this engine continues.
        age_s: Seconds since the first engine received the request, from which the deadline counts.
        forecast: Of the whole output, including `output`.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    options: RequestOptions = DEFAULT_OPTIONS
    output: list[int] = []
    age_s: float = 0.0
    forecast: Forecast | None = None


class Reforecast(msgspec.Struct, frozen=True, tag="reforecast", array_like=True):
    id: int
    forecast: Forecast


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Aborts requests. Ids of finished requests are ignored."""

    ids: list[int]
    reason: FinishReason = FinishReason.ABORT


class DescribeRequests(msgspec.Struct, frozen=True, tag="describe", array_like=True):
    """Asks for a `RequestStates` message with this id.

    Attributes:
        rows: Maximum number of requests, the first in rank order; None for all.
        finished_after: `RequestStates.total_finished` after which finished requests are wanted.
        has_steps: Whether steps are wanted, which the engine records for some seconds after such a message.
        has_facts: Whether to ask the policies about each request.
    """

    id: int
    rows: int | None = None
    finished_after: int | None = None
    has_steps: bool = False
    has_facts: bool = False


class FindHistories(msgspec.Struct, frozen=True, tag="find_histories", array_like=True):
    """Asks for a `HistoriesFound` message with this id.

    Without `numbers`, it is for `most` requests at most that lived in the last `since_s` seconds.
    """

    id: int
    numbers: list[int] | None = None
    since_s: float = 0.0
    most: int = 0


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", array_like=True):
    """Asks for an `AdapterLoaded` message with this id, before which the engine runs no later message."""

    id: int
    adapter: Adapter


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", array_like=True):
    """Unloads an adapter that no request at the engine uses."""

    number: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    pass


ToEngine = Add | Reforecast | Abort | DescribeRequests | FindHistories | LoadAdapter | UnloadAdapter | Shutdown


# -- from the engine ------------------------------------------------------------------------------------------


class LoadProgress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    what: str
    share: float


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """Reports that the engine accepts requests, and describes the engine.

    Attributes:
        cpu_block_bytes: Differs from `block_bytes` if `swap_dtype` is not "auto".
        recipe_path: Recipe as configured, absolute if it is in a file; empty is `recipe`.
    """

    model: str
    folder: str
    max_model_len: int
    vocab_size: int
    device_blocks: int
    cpu_blocks: int
    block_size: int
    block_bytes: int
    cpu_block_bytes: int
    swap_dtype: str
    recipe: str
    dtype: str
    device: str
    cost: LinearCost
    caches_prefixes: bool = True
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    recipe_path: str = ""
    recipe_params: dict[str, Value] = {}
    task: Task = Task.GENERATE
    dimensions: int = 0
    asks_pairs: bool = False

    @property
    def cache_blocks(self) -> int:
        """Number of KV blocks that can cache prefixes. CPU blocks can only if swapped copies are exact."""
        return self.device_blocks + (self.cpu_blocks if SWAP_FORMATS[self.swap_dtype].is_exact else 0)


class EngineFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """Reports why the engine cannot start or continue. The text must not be shown to clients."""

    text: str


class StepOutputs(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """Start or result of one engine step.

    Attributes:
        details: By index into `ids`, the requests that generated a token.
        started: Requests that run for the first time, sent before the step runs.
        errors: Error text for the client, by id.
        cached: Number of prefix-cache hit tokens of `started` requests by id, if not 0.
        refused: Failed requests that exceed a limit.
    """

    ids: list[int] = []
    tokens: list[int] = []
    details: dict[int, TokenDetail] = {}
    ended: list[tuple[int, str]] = []
    started: list[int] = []
    errors: dict[int, str] = {}
    cached: dict[int, int] = {}
    refused: list[int] = []


class PromptScores(msgspec.Struct, frozen=True, tag="scores", array_like=True):
    """Log-probabilities of a request's next prompt tokens, sent before its first output token.

    Each message has a few hundred tokens, so that none takes long to decode.
    """

    id: int
    scores: list[TokenLogprob]


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    id: int
    param: str | None
    text: str


class Stats(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    blocks_used: int
    metrics: Snapshot

    @property
    def running(self) -> int:
        return int(sum(self.metrics.row("num_requests_running")))

    @property
    def waiting(self) -> int:
        return int(sum(self.metrics.row("num_requests_waiting")))


class RequestState(msgspec.Struct, frozen=True, array_like=True):
    """State of an unfinished request in the scheduler. Fields are None while they do not apply.

    Attributes:
        state: "running" if it is in the latest plan, "waiting" if it has never run, "preempted" if its KV is on the
            device or dropped, "swapped" if its KV is on the CPU tier or moving.
        wait_s: Seconds since it began to wait for `wait_reason`.
        predicted_tokens: Of its whole output; 80 % of outputs have `predicted_low` to `predicted_high`.
        ttft_s, tpot_s, jct_s: Its objectives.
        program: Name of its program, if it is a call of one.
    """

    number: int
    state: str
    service: ServiceClass
    is_urgent: bool
    priority: int
    place: int | None
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    device_blocks: int = 0
    cpu_blocks: int = 0
    wait_reason: str | None = None
    wait_s: float | None = None
    short_blocks: int = 0
    predicted_tokens: float | None = None
    forecast_source: str | None = None
    predicted_low: float | None = None
    predicted_high: float | None = None
    max_tokens: int = 0
    age_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    jct_s: float | None = None
    facts: list[Fact] = []
    program: str | None = None

    @classmethod
    def of(cls, request: Request, now: float, state: str, place: int | None, **more: Any) -> RequestState:
        predicted, options = current_prediction(request), request.options
        return cls(
            request.id,
            state,
            options.service,
            options.is_urgent,
            options.priority,
            place,
            len(request.prompt),
            len(request.progress.output),
            request.progress.computed,
            predicted_tokens=predicted and predicted.tokens,
            forecast_source=predicted and predicted.source,
            predicted_low=predicted and predicted.low,
            predicted_high=predicted and predicted.high,
            max_tokens=request.max_tokens,
            age_s=now - request.arrival,
            program=options.program and options.program.name,
            **{name: seconds for name, seconds in request.progress.target._asdict().items() if seconds < math.inf},
            **more,
        )


class RequestGroup(msgspec.Struct, frozen=True, array_like=True):
    service: ServiceClass
    state: str
    wait_reason: str | None
    requests: int
    device_blocks: int
    cpu_blocks: int


class RequestStates(msgspec.Struct, frozen=True, tag="states", array_like=True):
    """Reply to the `DescribeRequests` message with the same id. Times are on the engine's clock.

    Attributes:
        groups: All unfinished requests, including those beyond the wanted rows.
        steps: Steps since the last reply with steps.
        seconds: CPU time that the reply took.
        between_steps_s: Mean time between consecutive steps that `cost` does not contain.
    """

    id: int
    requests: list[RequestState]
    groups: list[RequestGroup] = []
    now: float = 0.0
    total_finished: int = 0
    finished: list[History] = []
    steps: list[StepSummary] = []
    seconds: float = 0.0
    cost: LinearCost | None = None
    between_steps_s: float = 0.0


class HistoriesFound(msgspec.Struct, frozen=True, tag="histories", array_like=True):
    """Reply to the `FindHistories` message with the same id. Times are on the engine's clock.

    `competitors` are requests that ran longest while a wanted one waited, by its number.
    """

    id: int
    now: float
    histories: list[History]
    competitors: dict[int, list[Competitor]] = {}
    standings: dict[int, Standing] = {}


class AdapterLoaded(msgspec.Struct, frozen=True, tag="adapter_loaded", array_like=True):
    """Reply to the `LoadAdapter` message with the same id, with why the adapter is not loaded, or empty."""

    id: int
    error: str = ""


FromEngine = (
    LoadProgress
    | Ready
    | EngineFailed
    | StepOutputs
    | PromptScores
    | Refused
    | Stats
    | RequestStates
    | HistoriesFound
    | AdapterLoaded
)
