"""Wait reasons in words, each with the option that would change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from skipjoin.core.scheduling.waits import WaitReason
from skipjoin.observe.life import RUNNING

NO_REPLICA = "no_replica"


class Explanation(NamedTuple):
    """Wait reason for a reader.

    Attributes:
        short: A few words, for tables.
        text: What the request waits for.
        remedy: What would shorten the wait; empty if no setting does.
    """

    short: str
    text: str
    remedy: str = ""


class EngineLimits(Protocol):
    """Limits of an engine. None is unknown."""

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
    """Options that remedies name: the recipe, its parameters, and memory for the KV cache."""

    recipe: str = "--recipe"
    params: str = "--set"
    kv: str = "--kv-cache-gib"


_OPTIONS = OptionNames()


def explanations(info: EngineLimits, options: OptionNames = _OPTIONS) -> dict[str, Explanation]:
    """Return the explanations of all reasons, with the limits of this server's engines."""
    count = "" if info.max_num_seqs is None else f"{info.max_num_seqs} "
    slots = "" if info.max_num_seqs is None else f" (now {info.max_num_seqs})"
    tokens = "" if info.max_num_batched_tokens is None else f" (now {info.max_num_batched_tokens})"
    pool = f"{info.device_blocks} blocks of {info.block_size} tokens"
    more_kv = f"More memory for the KV cache lets more requests run: {options.kv} (now {pool})."
    other_recipe = f"Another recipe may rank it higher: {options.recipe} (now {info.recipe})."
    policy = (
        f"Parameters of the recipe ({options.params}) or another recipe may run it earlier: {options.recipe} "
        f"(now {info.recipe})."
    )
    return {
        RUNNING: Explanation("running", "It is in the running batch."),
        NO_REPLICA: Explanation("no engine", "No engine is running that could take it.", "See the server's log."),
        WaitReason.NO_SLOT: Explanation(
            "no slot",
            f"All {count}slots of the batch are taken by requests of higher rank.",
            f"More slots let more requests run at once, each a little slower: --max-num-seqs{slots}. {other_recipe}",
        ),
        WaitReason.TOKEN_BUDGET: Explanation(
            "token budget",
            "The step has its maximum of tokens from requests of higher rank.",
            f"A larger step takes more of them, but longer: --max-num-batched-tokens{tokens}.",
        ),
        WaitReason.NO_KV: Explanation(
            "no KV blocks",
            "The KV cache has too few free blocks, because other requests hold them.",
            f"{more_kv} {other_recipe}",
        ),
        WaitReason.BEHIND_MEMORY: Explanation(
            "behind memory",
            "A request of higher rank waits for KV blocks, and may not be overtaken.",
            f"{more_kv} {other_recipe}",
        ),
        WaitReason.KV_ON_CPU: Explanation(
            "KV on CPU", "The KV is in CPU memory and has not been swapped in yet.", more_kv
        ),
        WaitReason.KV_IN_TRANSIT: Explanation("swapping", "The KV is being copied between the device and the CPU."),
        WaitReason.BEHIND_PREFIX: Explanation(
            "shared prefix", "A running request computes a prefix that will be reused, which saves work."
        ),
        WaitReason.HELD_BY_BATCHER: Explanation(
            "held by batcher", f"The batcher of {info.recipe} leaves it out although there is room.", policy
        ),
        WaitReason.HELD_BY_ADMISSION: Explanation(
            "held by admission", f"The admission policy of {info.recipe} holds it back although there is room.", policy
        ),
        WaitReason.HELD_BY_EVICTION: Explanation(
            "held by eviction", f"The eviction policy of {info.recipe} keeps it away although there is room.", policy
        ),
        WaitReason.GRAMMAR: Explanation(
            "grammar",
            "The grammar of its structured output is being compiled, or computes the allowed tokens.",
            "A smaller or less ambiguous grammar takes less time.",
        ),
        WaitReason.NOT_EXAMINED: Explanation(
            "not examined", "The scheduler made no decision about it: it has just arrived, or ranks far behind."
        ),
        WaitReason.TOKEN_PENDING: Explanation("next step", "It was chosen, and its step waits for steps in flight."),
        WaitReason.DISPATCH: Explanation("dispatch", "It was chosen, and its step is being sent to the device."),
    }


def words_of(reasons: Mapping[str, Explanation]) -> dict[str, dict[str, str]]:
    """Return reasons in words as JSON."""
    return {str(name): reason._asdict() for name, reason in reasons.items()}
