"""An engine around a model whose requests have a state: its pools, and preemption by a recipe within them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from skipjoin.builtin import builtin_model_path
from skipjoin.config import ConfigError, EngineConfig
from skipjoin.core.events import Preempted, Preemption
from skipjoin.engine.build import assemble
from skipjoin.engine.loop import EngineLoop
from skipjoin.sampling import SamplingParams
from support.hybrid_models import HYBRIDS

MIB = 1 / 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hybrid")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin_model_path() / name, made)
    (made / "config.json").write_text(json.dumps(HYBRIDS["granite_hybrid"] | {"vocab_size": 553}))
    return made


def config_of(folder: Path, recipe: str, kv_mib: float, **fields: object) -> EngineConfig:
    fields = {"recipe": recipe, "kv_cache_gib": kv_mib * MIB, "max_num_seqs": 3, **fields}
    return EngineConfig(model=str(folder), load_format="dummy", profile="off", threads=1, max_model_len=128, **fields)


def outputs(config: EngineConfig) -> tuple[list[list[int]], set[Preemption]]:
    loop = EngineLoop(engine := assemble(config))
    for number in range(8):
        prompt = [number + 7 * place for place in range(5 + 11 * (number % 3))]
        loop.add(number, prompt, SamplingParams(temperature=0, max_tokens=10 + 25 * (number % 2), ignore_eos=True))
    live, how = list(engine.core.requests.values()), set()
    while not loop.idle:
        how |= {event.how for event in loop.step() if isinstance(event, Preempted)}
    engine.core.kv.check()
    loop.close()
    return [request.progress.output for request in live], how


def test_a_recipe_preempts_a_model_with_states_without_a_trace(folder: Path) -> None:
    alone, how = outputs(config_of(folder, "fcfs", 8, max_num_seqs=1, enable_prefix_caching=False))
    assert not how
    small = config_of(folder, "fastserve", 0.25, swap_space_gib=4 * MIB, recipe_params={"paced": False})
    found, how = outputs(small)
    assert found == alone
    assert how & {Preemption.SWAP, Preemption.DROP}


def test_states_take_a_part_of_the_pools(folder: Path) -> None:
    engine = assemble(config_of(folder, "fcfs", 1, swap_space_gib=2 * MIB, state_snapshots=5))
    spec, states, info = engine.executor.rank_specs[0], engine.core.kv.states, engine.info
    engine.executor.close()
    here = (states.total + 5) * spec.state_bytes + info.device_blocks * info.block_bytes
    there = states.cpu_total * spec.state_bytes + info.cpu_blocks * info.cpu_block_bytes
    assert 0 <= (1 << 20) - here < info.block_bytes
    assert 0 <= (2 << 20) - there < info.block_bytes
    assert (states.total, states.cpu_total) == (6, 24)
    with pytest.raises(ConfigError, match="has no room for a request's state of"):
        assemble(config_of(folder, "fcfs", 0.02))
