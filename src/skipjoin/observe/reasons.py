from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from skipjoin.core.refusals import QUIET_S
from skipjoin.core.waits import WaitReason
from skipjoin.observe.history import RUNNING

NO_REPLICA = "no_replica"


class ReasonText(NamedTuple):
    """Wait reason in a few words for tables, a text, and what would shorten the wait, if anything does."""

    short: str
    text: str
    remedy: str = ""


class EngineLimits(Protocol):
    @property
    def max_num_seqs(self) -> int | None: ...
    @property
    def max_num_batched_tokens(self) -> int | None: ...
    @property
    def device_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def recipe(self) -> str: ...


class OptionNames(NamedTuple):
    recipe: str = "--recipe"
    params: str = "--set"
    kv: str = "--kv-cache-gib"
    objectives: str = "--slo-tpot-ms"
    best_effort_wait: str = "--best-effort-wait-s"
    param_names: tuple[str, ...] = ()


_OPTIONS = OptionNames()
# Parameters of recipes that limit the tokens of a step further.
_STEP_TOKENS = ("chunk_tokens", "forward_tokens")


def reason_texts(info: EngineLimits, options: OptionNames = _OPTIONS) -> dict[str, ReasonText]:
    count = "" if info.max_num_seqs is None else f"{info.max_num_seqs} "
    slots = "" if info.max_num_seqs is None else f" (now {info.max_num_seqs})"
    tokens = "" if info.max_num_batched_tokens is None else f" (now {info.max_num_batched_tokens})"
    pool = f"{info.device_blocks} blocks of {info.block_size} tokens"
    more_kv = f"More memory for the KV cache lets more requests run: {options.kv} (now {pool})."
    own_tokens = "".join(f", or {options.params} {name}=N" for name in options.param_names if name in _STEP_TOKENS)
    other_recipe = f"Another recipe may rank it higher: {options.recipe} (now {info.recipe})."
    params = f"Parameters of the recipe ({options.params} with {', '.join(options.param_names)}) or another"
    another = params if options.param_names else "Another"
    policy = f"{another} recipe may run it earlier: {options.recipe} (now {info.recipe})."
    objectives = (
        f"An objective with more time per token, {options.objectives}, allows longer steps. "
        if options.objectives
        else ""
    )
    return {
        RUNNING: ReasonText("running", "It is in the running batch."),
        NO_REPLICA: ReasonText("no engine", "No engine is running that could take it.", "See the server's log."),
        WaitReason.NO_SLOT: ReasonText(
            "no slot",
            f"All {count}slots of the batch are taken by requests of higher rank.",
            f"More slots let more requests run at once, each a little slower: --max-num-seqs{slots}. {other_recipe}",
        ),
        WaitReason.TOKEN_BUDGET: ReasonText(
            "token budget",
            "The step has its maximum of tokens from requests of higher rank.",
            f"A larger step takes more of them, but longer: --max-num-batched-tokens{tokens}{own_tokens}.",
        ),
        WaitReason.NO_KV: ReasonText(
            "no KV blocks",
            "The KV cache has too few free blocks, because other requests hold them.",
            f"{more_kv} {other_recipe}",
        ),
        WaitReason.BEHIND_MEMORY: ReasonText(
            "behind memory",
            "A request of higher rank waits for KV blocks, or lost some in this step, and may not be overtaken.",
            f"{more_kv} {other_recipe}",
        ),
        WaitReason.KV_ON_CPU: ReasonText(
            "KV on CPU", "The KV is in CPU memory and has not been swapped in yet.", more_kv
        ),
        WaitReason.KV_IN_TRANSIT: ReasonText("swapping", "The KV is being copied between the device and the CPU."),
        WaitReason.BEHIND_PREFIX: ReasonText(
            "shared prefix", "A running request computes a prefix that will be reused, which saves work."
        ),
        WaitReason.BEHIND_REAL_TIME: ReasonText(
            "behind real-time",
            "It is best-effort, and a step with it would take too long for real-time requests, which are live or were "
            f"within the last {QUIET_S:.0f} s.",
            f"It runs without limit once no real-time request has been live for {QUIET_S:.0f} s. {objectives}"
            f"A smaller {options.best_effort_wait} serves the oldest best-effort request earlier.",
        ),
        WaitReason.STEP_TIME: ReasonText(
            "step time",
            "A step with it would take too long for a request of higher rank: for the deadline of its next token, or "
            "for its client's share of the time.",
            policy,
        ),
        WaitReason.HELD_BY_BATCHER: ReasonText(
            "held by batcher",
            f"The batcher of {info.recipe} leaves it out although the step has room for more requests and tokens, for "
            "example so that all stages of a pipeline have equal work.",
            policy,
        ),
        WaitReason.HELD_BY_ADMISSION: ReasonText(
            "held by admission",
            "The KV cache has blocks for its next step, but not all that the admission policy of "
            f"{info.recipe} reserves for it.",
            f"{more_kv} {policy}",
        ),
        WaitReason.HELD_BY_EVICTION: ReasonText(
            "held by eviction", "It pauses, because its KV is about to make room for requests of higher rank.", more_kv
        ),
        WaitReason.GRAMMAR: ReasonText(
            "grammar",
            "The grammar of its structured output is being compiled, computes the allowed tokens, or waits for others "
            "of its API key.",
            "A smaller or less ambiguous grammar takes less time.",
        ),
        WaitReason.NOT_EXAMINED: ReasonText("not examined", "It has just arrived: no step was planned since."),
        WaitReason.TOKEN_PENDING: ReasonText("next step", "It was chosen, and its step waits for steps in flight."),
        WaitReason.DISPATCH: ReasonText("dispatch", "It was chosen, and its step is being sent to the device."),
    }


def words_of(reasons: Mapping[str, ReasonText]) -> dict[str, dict[str, str]]:
    return {str(name): reason._asdict() for name, reason in reasons.items()}
