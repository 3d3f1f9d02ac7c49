"""The part `ranks`: what several ranks need, with one card: two processes that share it, and groups of one.

Two ranks take turns on the card, so only their results count; the seconds of a sum are not those of two cards.
"""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE, Popen

import torch
import torch.distributed as dist
from common import Figures, Task, recorded, seconds_of, spread

from skipjoin.model.torch_group import OneShotSum

_RANKS, _VALUES = 2, 4096
_JOIN_S = 60.0


def measure(task: Task) -> Figures:
    figures: Figures = {"pair": _pair(task)}
    task.keep(figures)
    figures["alone"] = _alone(task)
    return figures


def _pair(task: Task) -> list[Figures]:
    """Run two processes that add up over gloo and, on a card, by the one-shot kernel."""
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as scratch:
        command = [sys.executable, __file__, task.device, scratch]
        ranks = [Popen([*command, str(rank)], stdout=PIPE, stderr=PIPE, text=True) for rank in range(_RANKS)]
        found = []
        for rank in ranks:
            out, errors = rank.communicate(timeout=2 * _JOIN_S)
            found.append(json.loads(out.splitlines()[-1]) if rank.returncode == 0 else {"failed": errors[-500:]})
        return found


def _rank(device: str, scratch: str, rank: int) -> Figures:
    store = dist.FileStore(str(Path(scratch) / "store"), _RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS, timeout=timedelta(seconds=_JOIN_S))
    x = torch.full((_VALUES,), 1.0 + rank, device=device)
    dist.all_reduce(x)
    figures: Figures = {"gloo": bool((x == 3).all())}
    if device == "cuda":
        try:
            group = dist.group.WORLD
            assert group is not None
            shared = OneShotSum(group, torch.device(device))
            for dtype in (torch.bfloat16, torch.float32):
                x = torch.full((_VALUES,), 1.0 + rank, device=device, dtype=dtype)
                shared.add_up(x)
                figures[f"one_shot {dtype}"] = bool((x == 3).all())
            figures["one_shot_ms"] = spread(seconds_of(device, lambda: shared.add_up(x)), 1e3)
        except Exception as error:  # a card that cannot share its memory is a finding
            figures["one_shot failed"] = f"{type(error).__name__}: {error}"[:300]
    dist.barrier()
    dist.destroy_process_group()
    return figures


def _alone(task: Task) -> Figures:
    """Record collectives of a group of one, NCCL's on a card, and repeat them with other contents."""
    backend = "nccl" if task.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as scratch:
        dist.init_process_group(backend, store=dist.FileStore(f"{scratch}/store", 1), rank=0, world_size=1)
        try:
            x = torch.zeros(_VALUES, device=task.device)
            out = [torch.empty_like(x)]

            def collect() -> None:
                dist.all_reduce(x)
                dist.all_gather(out, x)

            replay = recorded(task.device, collect)
            x.fill_(3.0)
            replay()
            return {"backend": backend, "replayed": bool((out[0] == 3).all())}
        except Exception as error:  # a library that cannot be recorded is a finding
            return {"backend": backend, "failed": f"{type(error).__name__}: {error}"[:300]}
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    print(json.dumps(_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
