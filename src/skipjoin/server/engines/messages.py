"""The messages between the API process and the engine processes: msgspec structs of declared types, as msgpack.

One `StepOutputs` has all tokens of an engine step, so that the number of messages does not grow with the batch.
"""

from __future__ import annotations

import msgspec

from skipjoin.config import HANG_LIMITS, EngineConfig, HangLimits
from skipjoin.core.forecast import Forecast
from skipjoin.core.request import DEFAULT_OPTIONS, FinishReason, RequestOptions, ServiceClass
from skipjoin.observe.metric_table import Snapshot
from skipjoin.policies.cost import LinearCost
from skipjoin.sampling import SamplingParams, Scored, TokenDetail


class ListenerKey(msgspec.Struct, frozen=True):
    """What an engine needs to connect to the API process's listener: see `link`.

    host, port: the listener's address. server: its public key. public, secret: the engines' key pair. Keys are in Z85.
    """

    host: str
    port: int
    server: str
    public: str
    secret: str


class Setup(msgspec.Struct, frozen=True):
    """The engine process's whole input, as JSON on its standard input.

    at: the address of the API process's socket on this machine, or the key to its listener. parent: id of the process
    that started the engine, which ends with it. pulse_fd: a file descriptor that gets a byte once the engine takes
    requests, and more of them while it makes progress: see `pulse`. limits: when it hangs.
    """

    config: EngineConfig
    at: str | ListenerKey
    parent: int
    pulse_fd: int | None = None
    limits: HangLimits = HANG_LIMITS


# -- to the engine --------------------------------------------------------------------------------------------


class Add(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """A request. id: unique for the life of the engine.

    output: the tokens that another engine has generated for it; this engine continues after them. age_s: seconds since
    it arrived at the first engine, which is when the deadline in its options begins to count. forecast: of the whole
    output.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    options: RequestOptions = DEFAULT_OPTIONS
    output: list[int] = []
    age_s: float = 0.0
    forecast: Forecast | None = None


class Reforecast(msgspec.Struct, frozen=True, tag="reforecast", array_like=True):
    """Gives a request another forecast; ignored if it has ended."""

    id: int
    forecast: Forecast


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Ends these requests; ids of requests that have ended are ignored. reason: see `EngineCore.abort`."""

    ids: list[int]
    reason: FinishReason = FinishReason.ABORT


class DescribeRequests(msgspec.Struct, frozen=True, tag="describe", array_like=True):
    """Asks for `RequestStates` with this id."""

    id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """Ends the process at once."""


ToEngine = Add | Reforecast | Abort | DescribeRequests | Shutdown


# -- from the engine ------------------------------------------------------------------------------------------


class LoadProgress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """Progress of the start. what: the stage. share: of the stage that is done, between 0 and 1."""

    what: str
    share: float


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The engine takes requests. Its description:

    folder: of the tokenizer. max_model_len: most tokens of prompt and output together. device_blocks, host_blocks: KV
    blocks of block_size tokens on each tier; there they have block_bytes and host_block_bytes, swap_dtype says why.
    caches_prefixes: whether requests use the KV of others whose prompts begin alike. cost: of steps, as known at the
    start.
    """

    model: str
    folder: str
    max_model_len: int
    vocab_size: int
    device_blocks: int
    host_blocks: int
    block_size: int
    block_bytes: int
    host_block_bytes: int
    swap_dtype: str
    recipe: str
    dtype: str
    device: str
    cost: LinearCost
    caches_prefixes: bool = True

    @property
    def cache_blocks(self) -> int:
        """KV blocks that may hold prefixes: those of the host keep them where copies are exact."""
        return self.device_blocks + (self.host_blocks if self.swap_dtype == "auto" else 0)


class EngineFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The engine cannot start or continue; the process ends. text: for the operator, never for clients."""

    text: str


class StepOutputs(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """The beginning or the outcome of one engine step.

    ids, tokens: a generated token for each of these requests, whose ids are distinct. details: by index into `ids`;
    scores of the prompt may have come before, as `PromptScores`.
    ended: (id, reason) of requests that have ended, after this step's token; reason is a `FinishReason`.
    started: requests that run for the first time, sent before they do. cached: by id, of those the tokens whose KV was
    there, where it is any. errors: by id, the text for the client of a request that ended with an error.
    """

    ids: list[int] = []
    tokens: list[int] = []
    details: dict[int, TokenDetail] = {}
    ended: list[tuple[int, str]] = []
    started: list[int] = []
    errors: dict[int, str] = {}
    cached: dict[int, int] = {}


class PromptScores(msgspec.Struct, frozen=True, tag="scores", array_like=True):
    """Log-probabilities of the next tokens of a request's prompt, before the `StepOutputs` with its first token.

    They come in messages of a few hundred tokens, so that none takes long to be read.
    """

    id: int
    scores: list[Scored]


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """The engine refuses a request. param: the field at fault. text: may be shown to the client."""

    id: int
    param: str | None
    text: str


class Stats(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    """The engine's metrics. blocks_used: of Ready.device_blocks, by the ledger."""

    blocks_used: int
    metrics: Snapshot

    @property
    def running(self) -> int:
        """Requests in the running batch."""
        return int(sum(self.metrics.row("num_requests_running")))

    @property
    def waiting(self) -> int:
        """Requests that are not running."""
        return int(sum(self.metrics.row("num_requests_waiting")))


class RequestState(msgspec.Struct, frozen=True, array_like=True):
    """A request that is not complete, as the scheduler sees it.

    number: its id at the engine. state: "running" in the latest plan; "waiting" and never run; "preempted", with its KV
    on the device or dropped; "swapped", with its KV on the host or moving. service: its class. is_urgent: whether it
    comes before the others of its class. place: in the scheduler's order, 0 is first;
    None without an engine. computed_tokens: tokens that have KV. device_blocks, host_blocks: KV blocks that it holds.
    wait_reason, wait_s: what keeps it from running (`core.scheduling.waits.WaitReason`), and for how many seconds; None
    while it runs. short_blocks: KV blocks that were missing when it began to wait for them. predicted_tokens,
    forecast_source: the expected length of its whole output, and what made that forecast; None without one.
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
    device_blocks: int
    host_blocks: int
    wait_reason: str | None
    wait_s: float | None
    short_blocks: int = 0
    predicted_tokens: float | None = None
    forecast_source: str | None = None


class RequestStates(msgspec.Struct, frozen=True, tag="states", array_like=True):
    """The answer to `DescribeRequests`, whose id it has."""

    id: int
    requests: list[RequestState]


FromEngine = LoadProgress | Ready | EngineFailed | StepOutputs | PromptScores | Refused | Stats | RequestStates
