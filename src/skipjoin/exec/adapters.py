from __future__ import annotations

import torch

from skipjoin.adapters import Adapter
from skipjoin.exec.rank_spec import free_ram
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.errors import AdapterError

_MIB = 1 << 20


def load_adapter(model: CausalLM, adapter: Adapter) -> int:
    """Load an adapter on the thread that runs the model, and return its bytes.

    Raises:
        AdapterError: If it is not one of this model, or is larger than the free memory.
    """
    try:
        needed, free = model.adapters.planned_bytes(adapter.folder), _free_bytes(model.device)
        if needed > free:
            raise AdapterError(
                f"{adapter.folder} needs {needed / _MIB:.0f} MiB, and {free / _MIB:.0f} MiB of memory are free: unload "
                "another, or lower --kv-cache-gib or --gpu-memory-utilization"
            )
        model.adapters.load(adapter.number, adapter.folder)
    except AdapterError as error:
        raise AdapterError(f"adapter {adapter.name}: {error}") from error
    return model.adapters.bytes[adapter.number]


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return free_ram()
    # The allocator's cache counts as used on the device.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused
