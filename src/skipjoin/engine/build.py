from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace

from skipjoin.config import EngineConfig
from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.engine.learned import LearnedKeeper, state_file
from skipjoin.engine.load import Loaded, load
from skipjoin.engine.profiling.calibration import Calibration
from skipjoin.engine.profiling.startup import start_cost
from skipjoin.engine.scheduling import depth_of, engine_limits, make_scheduler, recipe_settings
from skipjoin.exec.rank_model import OnProgress
from skipjoin.exec.rank_spec import ModelExecutor
from skipjoin.kv_format import SWAP_FORMATS, types_text
from skipjoin.options import Value
from skipjoin.policies.cost import LearningCost
from skipjoin.policies.whole_prompts import WholePrompts
from skipjoin.pooling import Pooling, Task, wrong_task
from skipjoin.recipes import find
from skipjoin.sampling import ParameterError


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of a built engine. Bytes are totals over all ranks; `dimensions` are those of its vectors.

    `asks_pairs` means that it judges a pair of texts in a conversation, with yes or no.
    """

    model: str
    folder: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device_blocks: int
    cpu_blocks: int
    block_size: int
    block_bytes: int
    cpu_block_bytes: int
    swap_dtype: str
    recipe: str
    recipe_params: dict[str, Value]
    notice: str
    dtype: str
    device: str
    weight_bytes: int
    cost: LearningCost
    task: Task = Task.GENERATE
    dimensions: int = 0
    asks_pairs: bool = False

    def check_pooling(self, pooling: Pooling | None) -> None:
        self.check_task((Task.GENERATE,) if pooling is None else (Task.EMBED, Task.SCORE))
        asked = None if pooling is None else pooling.dimensions
        if asked is not None and not 1 <= asked <= self.dimensions:
            raise ParameterError("dimensions", f"dimensions must be in [1, {self.dimensions}], got {asked}")

    def check_task(self, tasks: Collection[Task]) -> None:
        if self.task not in tasks:
            raise ParameterError("model", wrong_task(self.model, self.task))


@dataclass(frozen=True, slots=True)
class Engine:
    core: EngineCore
    executor: ModelExecutor
    info: EngineInfo
    seed: int
    jct_scale: float | None = None
    caches_prefixes: bool = True
    adapter_bytes: Mapping[int, int] = field(default_factory=dict)
    learned: LearnedKeeper | None = None
    calibration: Calibration | None = None


def assemble(config: EngineConfig, on_progress: OnProgress = lambda what, share: None) -> Engine:
    loaded = load(config, on_progress)
    try:
        return engine_around(loaded, config)
    except BaseException:
        loaded.executor.close()
        raise


def engine_around(loaded: Loaded, config: EngineConfig) -> Engine:
    """Build an engine on a loaded model. Engines may use the same model in turn, each once the previous one is idle."""
    executor = loaded.executor
    blocks, cpu_blocks, block_size = executor.pools
    spec = executor.rank_specs[0]
    cost, calibration = start_cost(config, loaded)
    recipe = find(config.recipe)
    settings = recipe_settings(config, cost, engine_limits(config, loaded))
    params = recipe.resolve(settings, config.recipe_params)
    ledger = KVLedger(
        blocks, cpu_blocks, block_size, is_exact=SWAP_FORMATS[spec.swap_dtype].is_exact, states=executor.states
    )
    policies = recipe.make(settings, params)
    pooling = loaded.config.pooling
    if loaded.config.is_encoder:
        policies = replace(policies, batcher=WholePrompts(policies.batcher))
    scheduler = make_scheduler(config, policies, ledger, depth_of(config, executor))
    keeper = None
    if policies.learned is not None and config.learned_dir is not None:
        keeper = LearnedKeeper(policies.learned, state_file(config.learned_dir, config.model, recipe.name))
        keeper.load()
    info = EngineInfo(
        model=config.model,
        folder=str(loaded.folder),
        max_model_len=loaded.max_len,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=tuple(i for i in loaded.config.eos_token_ids if 0 <= i < loaded.config.vocab_size),
        device_blocks=blocks,
        cpu_blocks=cpu_blocks,
        block_size=block_size,
        block_bytes=sum(spec.block_bytes for spec in executor.rank_specs),
        cpu_block_bytes=sum(spec.cpu_block_bytes for spec in executor.rank_specs),
        swap_dtype=spec.swap_dtype,
        recipe=recipe.name,
        recipe_params=asdict(params),
        notice=params.notice(settings),
        dtype=types_text(spec.dtype, spec.kv_cache_dtype),
        device=spec.device_kind,
        weight_bytes=sum(spec.weight_bytes for spec in executor.rank_specs),
        cost=cost,
        task=Task.GENERATE if pooling is None else pooling.task,
        dimensions=0 if pooling is None else loaded.config.vector_width,
        asks_pairs=pooling is not None and bool(pooling.answers),
    )
    adapter_bytes: Counter[int] = Counter()
    for rank in executor.rank_specs:
        adapter_bytes.update(rank.adapter_bytes)
    return Engine(
        EngineCore(scheduler),
        executor,
        info,
        config.seed,
        jct_scale=config.slo_jct_scale,
        caches_prefixes=config.enable_prefix_caching
        and not loaded.config.is_encoder
        and (pooling is None or pooling.how == "last"),
        adapter_bytes=adapter_bytes,
        learned=keeper,
        calibration=calibration,
    )
