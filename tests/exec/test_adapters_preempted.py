"""Requests with adapters generate what models generate into which these are merged, however they are preempted."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from engines import BLOCK_SIZE, COMMON, CONFIGS, SwapAll, engine, mixed_requests, run
from rank_links import LAYERS
from test_invisible_preemption import FORCED, happened
from test_worker_sharded import outputs, sharded

from skipjoin.adapters import Adapter
from skipjoin.core.events import Preemption
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import Request
from skipjoin.model.errors import AdapterError
from skipjoin.model.loader import random_model
from skipjoin.model.weights import RandomWeights
from skipjoin.policies.eviction import Recompute
from support.adapters import write_adapter
from support.load import changed
from support.worlds import halved

_HIDDEN, _KV, _WIDTH = 48, 24, 80
_PARTS = {
    **{f"self_attn.{part}_proj": (_HIDDEN if part in "qo" else _KV, _HIDDEN) for part in "qkvo"},
    **{f"mlp.{part}_proj": (_WIDTH, _HIDDEN) for part in ("gate", "up")},
    "mlp.down_proj": (_HIDDEN, _WIDTH),
}
# Cases of `FORCED`, with what must have happened.
CASES = {
    "swapped at every step": {Preemption.SWAP, "moved in blocking"},
    "spilled at every step of a prompt": {Preemption.SPILL},
    "dropped at every step": {Preemption.DROP},
    "overlapped, moved concurrently": {"moved in overlapped"},
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> tuple[list[Adapter], list[Mapping[str, torch.Tensor]]]:
    """Return two adapters, and the changes of weights without one and by each."""
    shapes = {f"model.layers.{layer}.{part}": shape for layer in range(LAYERS) for part, shape in _PARTS.items()}
    folder, made, deltas = tmp_path_factory.mktemp("adapters"), [], [{}]
    for number, targets in enumerate((tuple(_PARTS), ("self_attn.q_proj", "self_attn.v_proj")), 1):
        own = {name: shape for name, shape in shapes.items() if name.endswith(targets)}
        deltas.append(write_adapter(folder / str(number), own, seed=number, size=0.15))
        made.append(Adapter(number, f"adapter {number}", str(folder / str(number))))
    return made, deltas


def model_of(deltas: Mapping[str, torch.Tensor]):
    plain = RandomWeights.take

    def take(self, name, *shape, rows=None, columns=None):
        whole = plain(self, name, *shape)
        return whole + deltas[name.removesuffix(".weight")] if name.removesuffix(".weight") in deltas else whole

    with mock.patch.object(RandomWeights, "take", take):
        return random_model(CONFIGS["llama"] | {"num_hidden_layers": LAYERS}, seed=3)


def requests_of(numbers=(0, 1, 2, 1, 0, 2, 1)) -> list[Request]:
    """Return requests with a common prefix, of which some use adapters."""
    found = []
    for request, adapter in zip(mixed_requests(common=COMMON), numbers, strict=True):
        made = changed(request, adapter=adapter)
        found.append(changed(made, prefix=ContentPrefix(BLOCK_SIZE, made.options.kv_salt)))
    return found


@pytest.fixture(scope="module")
def expected(adapters) -> list[list[int]]:
    """Return the output of each request, by models with merged weights and without a prefix cache."""
    found: list[list[int]] = [[] for _ in requests_of()]
    for number, deltas in enumerate(adapters[1]):
        own = [
            changed(request, prefix=None, adapter=0) for request in requests_of() if request.options.adapter == number
        ]
        run(*engine(model_of(deltas), Recompute(), device_blocks=60, slots=4), own)
        for request in own:
            found[request.id] = request.progress.output
    assert len({tuple(output) for output in found}) == len(found)
    return found


@cache
def base_model():
    return model_of({})


@pytest.mark.parametrize("case", halved(CASES))
def test_preemption_of_requests_with_adapters_is_invisible(adapters, expected, case):
    options = dict(FORCED[case])
    core, executor = engine(base_model(), options.pop("eviction")(), **options)
    for adapter in adapters[0]:
        assert executor.load_adapter(adapter) > 0
    requests = requests_of()
    events = run(core, executor, requests)
    assert outputs(requests) == expected
    assert CASES[case] <= {what for what, count in happened(events).items() if count}


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_load_adapters_in_the_order_of_plans(adapters, expected, tp, pp, tmp_path: Path):
    core, executor = sharded("swapped", "llama", tp, pp)
    for adapter in adapters[0]:
        assert executor.load_adapter(adapter) > 0
    with pytest.raises(AdapterError, match=r"adapter none: .* is not a folder"):
        executor.load_adapter(Adapter(9, "none", str(tmp_path / "none")))
    requests = requests_of()
    run(core, executor, requests)
    assert outputs(requests) == expected


def test_a_request_whose_adapter_is_not_loaded_is_dropped(adapters):
    core, executor = engine(model_of({}), SwapAll(), device_blocks=60)
    executor.load_adapter(adapters[0][0])
    executor.unload_adapter(1)
    requests = requests_of()
    run(core, executor, requests)
    assert [bool(request.progress.output) for request in requests] == [
        not request.options.adapter for request in requests
    ]
