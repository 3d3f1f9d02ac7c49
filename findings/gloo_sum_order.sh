#!/usr/bin/env bash
# Finding: with three or more ranks, Gloo's all_reduce sums an element in an order that depends on its place in the tensor.
# Version: torch 2.13.0 on CPUs
# Guess: a row's sum over ranks does not depend on the rows after it, since ranks and values are the same.
# What happens: of the first row's 768 values, 167 differ on three ranks between a tensor of 8 rows and one of that row
#   alone, and 243 on four ranks. With two ranks there is one order, and none differ.
# Why it matters: tensor-parallel models are not batch-invariant even where every other operation is, so a request's
#   tokens may depend on its neighbors. Skipjoin exchanges the terms and adds them in rank order from three ranks on.
source "$(dirname "$0")/support.bash"
packages torch==2.13.0 numpy==2.4.6
cat >"$work/sums.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, size, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    rows = torch.randn((8, 768), generator=torch.Generator().manual_seed(rank))
    first = rows[:1].clone()
    dist.all_reduce(rows)
    dist.all_reduce(first)
    if rank == 0:
        print(f"{size} ranks: {int((rows[0] != first[0]).sum())} of 768 differ", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    for size in (2, 3, 4):
        mp.spawn(work, (size, f"{sys.argv[1]}/meeting{size}"), nprocs=size)
PY
GLOO_SOCKET_IFNAME=lo "$PYTHON" "$work/sums.py" "$work" | expect "2 ranks: 0 of 768 differ
3 ranks: 167 of 768 differ
4 ranks: 243 of 768 differ"
