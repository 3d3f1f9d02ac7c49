"""Wait reasons in words, each with the option that would change it."""

from __future__ import annotations

from typing import NamedTuple

from skipjoin.core.scheduling.waits import WaitReason
from skipjoin.server.engines.messages import Ready

NO_REPLICA = "no_replica"
RUNNING = "running"


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


def explanations(info: Ready) -> dict[str, Explanation]:
    """Return the explanations of all reasons, with the limits of this server's engines."""
    slots = "" if info.max_num_seqs is None else f" (now {info.max_num_seqs})"
    tokens = "" if info.max_num_batched_tokens is None else f" (now {info.max_num_batched_tokens})"
    pool = f"{info.device_blocks} blocks of {info.block_size} tokens"
    more_kv = f"A larger KV pool lets more requests run: --kv-cache-gib (now {pool})."
    other_recipe = f"Another recipe may run it earlier: --recipe (now {info.recipe})."
    policy = f"Parameters of the recipe (--set) or another recipe may run it earlier: --recipe (now {info.recipe})."
    return {
        RUNNING: Explanation("running", "It is in the running batch."),
        NO_REPLICA: Explanation("no engine", "No engine is running that could take it.", "See the server's log."),
        WaitReason.NO_SLOT: Explanation(
            "no slot",
            f"All {info.max_num_seqs or ''} slots of the batch are taken by requests that rank before it.".replace(
                "  ", " "
            ),
            f"More slots let it run: --max-num-seqs{slots}. {other_recipe}",
        ),
        WaitReason.TOKEN_BUDGET: Explanation(
            "token budget",
            "The step has its maximum of tokens from requests that rank before it.",
            f"A larger step takes it earlier: --max-num-batched-tokens{tokens}. Each step then takes longer.",
        ),
        WaitReason.NO_KV: Explanation(
            "no KV blocks", "Other requests hold the KV blocks that it needs.", f"{more_kv} {other_recipe}"
        ),
        WaitReason.BEHIND_MEMORY: Explanation(
            "behind memory", "It ranks behind a request that waits for KV blocks.", f"{more_kv} {other_recipe}"
        ),
        WaitReason.KV_ON_CPU: Explanation(
            "KV on CPU", "Its KV is in CPU memory and has not been swapped in yet.", more_kv
        ),
        WaitReason.KV_IN_TRANSIT: Explanation("swapping", "Its KV is being copied between the device and the CPU."),
        WaitReason.BEHIND_PREFIX: Explanation(
            "shared prefix", "A running request computes a prefix that it will reuse, which saves work."
        ),
        WaitReason.HELD_BY_BATCHER: Explanation(
            "held by batcher", f"The batcher of {info.recipe} holds it back although there is room.", policy
        ),
        WaitReason.HELD_BY_ADMISSION: Explanation(
            "held by admission", f"The admission policy of {info.recipe} holds it back although there is room.", policy
        ),
        WaitReason.HELD_BY_EVICTION: Explanation(
            "held by eviction", f"The eviction policy of {info.recipe} keeps it away although there is room.", policy
        ),
        WaitReason.GRAMMAR: Explanation(
            "grammar", "The grammar of its structured output is being compiled.", "A smaller schema compiles faster."
        ),
        WaitReason.NOT_EXAMINED: Explanation(
            "not examined", "The scheduler made no decision about it: it has just arrived, or ranks far behind."
        ),
        WaitReason.TOKEN_PENDING: Explanation("next step", "It was chosen, and its step waits for steps in flight."),
        WaitReason.DISPATCH: Explanation("dispatch", "It was chosen, and its step is being sent to the device."),
    }
