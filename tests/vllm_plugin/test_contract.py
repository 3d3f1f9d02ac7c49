from __future__ import annotations

import os
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM's and torch's imports
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.request import RequestStatus

    from skipjoin.vllm.scheduler import Scheduler
    from support.vllm_shadow import (
        Setup,
        ShadowRunner,
        ShadowWorld,
        engine_config,
        make_request,
        make_scheduler,
        tier_config,
        write_model,
    )

from skipjoin.options import ConfigError
from skipjoin.vllm import compat
from skipjoin.vllm.plugin import register

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
# Recipes that swap ahead.
MOVING = ("adaptive", "fastserve")
RECIPES = ("adaptive", "fcfs", "sarathi", "fastserve", "alise", "bros", "econoserve")
SETUPS = [Setup(*made) for made in product(RECIPES, (False, True), (1, 2), (False, True))]
# A tier that is too small behind a slow link, on which `adaptive` still moves what takes longer to compute again, and
# one that holds everything and whose moves are cheap.
TIERS = [(12, 5e-3), (200, 20.0)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_every_request_reads_its_own_kv(model: Path, setup: Setup, seed: int) -> None:
    ShadowWorld(model, setup, seed).run()


@pytest.mark.parametrize(("cpu_blocks", "link_gb_s"), TIERS)
@pytest.mark.parametrize("setup", [setup for setup in SETUPS if setup.recipe in MOVING], ids=str)
def test_every_request_reads_its_own_kv_from_the_cpu_tier(
    model: Path, setup: Setup, cpu_blocks: int, link_gb_s: float
) -> None:
    world = ShadowWorld(model, replace(setup, cpu_blocks=cpu_blocks, link_gb_s=link_gb_s), 0)
    world.run()
    assert world.shadow.copied
    assert link_gb_s > 1 or world.shadow.overlapped


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("feature", [{"loras": 1}, {"loras": 2}, {"policy": "priority"}, {"chunked": False}], ids=str)
def test_supported_features_keep_every_request_correct(
    model: Path, feature: dict[str, Any], runner: int, is_async: bool
) -> None:
    ShadowWorld(model, Setup("fastserve", is_async, runner, caching=True, **feature), 1).run()


@pytest.mark.parametrize("window", [40, 96])
@pytest.mark.parametrize(
    "setup", [setup for setup in SETUPS if setup.recipe in ("adaptive", "fastserve", "econoserve")], ids=str
)
def test_layers_with_a_window_read_their_own_kv(model: Path, setup: Setup, window: int) -> None:
    ShadowWorld(model, replace(setup, window=window), 0).run()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("window", [0, 96])
@pytest.mark.parametrize("recipe", ["adaptive", "fastserve", "econoserve"])
def test_drafts_are_verified_between_preemptions(model: Path, recipe: str, window: int, seed: int) -> None:
    ShadowWorld(model, Setup(recipe, caching=bool(seed), window=window, drafts=3), seed).run()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "setup", [setup for setup in SETUPS if setup.recipe in ("adaptive", "fastserve", "econoserve")], ids=str
)
def test_every_image_is_encoded_when_it_is_read(model: Path, setup: Setup, seed: int) -> None:
    """The encoder cache has room for the longest image, so that requests wait for each other's encoder outputs."""
    world = ShadowWorld(model, replace(setup, encoder_cache=40), seed)
    world.run()
    assert world.shadow.encodings > 20


def test_a_paused_request_gives_its_room_in_the_encoder_cache(model: Path) -> None:
    config = engine_config(model, Setup("fastserve"), seqs=1, tokens=16, blocks=40)
    scheduler, shadow = make_scheduler(config), ShadowRunner(1, 1)
    scheduler.encoder_cache_manager = EncoderCacheManager(40)
    scheduler.max_num_encoder_input_tokens = 40
    for name, length, tier in (("first", 40, "default"), ("urgent", 37, "priority")):
        image = MultiModalFeatureSpec(None, "image", name, PlaceholderRange(0, length))
        more: dict[str, Any] = {"mm_features": [image], "extra_args": {"service_tier": tier}}
        scheduler.add_request(make_request(name, [500] * length + [20], 3, **more))
        turn(scheduler, shadow)
    computed = {name: request.num_computed_tokens for name, request in scheduler.requests.items()}
    assert computed == {"first": 16, "urgent": 16}
    while scheduler.has_unfinished_requests():
        turn(scheduler, shadow)
    assert shadow.encodings == 3, "the first image was evicted and computed again"


def test_the_shadow_runner_finds_wrong_kv(model: Path) -> None:
    config = engine_config(model, Setup(), seqs=2, tokens=64, blocks=20)
    scheduler, shadow = make_scheduler(config), ShadowRunner(2, 1)
    scheduler.add_request(make_request("r", list(range(20, 60)), 5))
    output = scheduler.schedule()
    scheduler.update_from_output(output, shadow.run(output))
    shadow.slots.clear()
    with pytest.raises(AssertionError, match="reads wrong KV at 0"):
        shadow.run(scheduler.schedule())


def finished(scheduler: Any, shadow: ShadowRunner) -> list[Any]:
    output = scheduler.schedule()
    results = scheduler.update_from_output(output, shadow.run(output)).values()
    return [ended for outputs in results for ended in outputs.outputs if ended.finish_reason is not None]


def turn(scheduler: Any, shadow: ShadowRunner) -> list[str]:
    return [output.request_id for output in finished(scheduler, shadow)]


def test_fcfs_takes_the_steps_and_the_order_of_vllm(model: Path) -> None:
    ends, steps = {}, {}
    for cls in (AsyncScheduler, Scheduler):
        config = engine_config(model, Setup("fcfs"), seqs=4, tokens=128, blocks=200)
        scheduler, shadow = make_scheduler(config, cls=cls), ShadowRunner(4, 1)
        for number in range(40):
            length, output = number * 7 % 60 + 1, number * 31 % 90 + 1
            scheduler.add_request(make_request(f"r{number}", [number + 20] * length, output))
        ends[cls], steps[cls] = [], 0
        while scheduler.has_unfinished_requests():
            ends[cls] += turn(scheduler, shadow)
            steps[cls] += 1
    assert ends[Scheduler] == ends[AsyncScheduler]
    assert abs(steps[Scheduler] - steps[AsyncScheduler]) <= 0.02 * steps[AsyncScheduler]


def test_a_short_request_preempts_long_ones_that_keep_their_kv(model: Path) -> None:
    config = engine_config(model, Setup("fastserve"), seqs=2, tokens=512, blocks=200)
    scheduler, shadow = make_scheduler(config), ShadowRunner(2, 1)
    for number in range(2):
        scheduler.add_request(make_request(f"long{number}", [20 + number] * 200, 250))
    for _ in range(60):
        turn(scheduler, shadow)
    scheduler.add_request(make_request("short", [30] * 8, 4))
    ended: list[str] = []
    for _ in range(10):
        ended += turn(scheduler, shadow)
        computed = [scheduler.requests[f"long{number}"].num_computed_tokens for number in range(2)]
        assert min(computed) >= 259, "a parked request lost its KV"
    assert ended == ["short"]


def test_parked_requests_that_hold_all_blocks_give_one_up(model: Path) -> None:
    config = engine_config(model, Setup("fastserve"), seqs=2, tokens=512, blocks=20)
    scheduler, shadow = make_scheduler(config), ShadowRunner(2, 1)
    for number in range(2):
        scheduler.add_request(make_request(f"r{number}", [20 + number] * 150, 60))
    turn(scheduler, shadow)
    for request in list(scheduler.running):
        scheduler._park(request)
    scheduler.running.clear()
    allocate = scheduler.kv_cache_manager.allocate_slots
    scheduler.kv_cache_manager.allocate_slots = lambda *args, **kwargs: None
    turn(scheduler, shadow)
    scheduler.kv_cache_manager.allocate_slots = allocate
    assert sorted(request.num_preemptions for request in scheduler.requests.values()) == [0, 1]
    ended: list[str] = []
    while scheduler.has_unfinished_requests():
        ended += turn(scheduler, shadow)
    assert sorted(ended) == ["r0", "r1"]


def test_streaming_input_ends_with_an_error_and_nothing_else(model: Path) -> None:
    config = engine_config(model, Setup(), seqs=2, tokens=64, blocks=20)
    scheduler, shadow = make_scheduler(config), ShadowRunner(2, 1)
    scheduler.add_request(make_request("session", [20] * 5, 5, resumable=True))
    scheduler.add_request(make_request("other", [20] * 5, 5))
    ended: list[Any] = []
    while scheduler.has_unfinished_requests():
        ended += finished(scheduler, shadow)
    assert [output.request_id for output in ended] == ["session", "other"]
    if hasattr(ended[0], "error"):  # of newer releases
        assert "does not support streaming input" in ended[0].error.message
        assert ended[1].error is None


def test_an_abort_of_a_parked_request_frees_its_blocks(model: Path) -> None:
    config = engine_config(model, Setup("fastserve"), seqs=1, tokens=512, blocks=40)
    scheduler, shadow = make_scheduler(config), ShadowRunner(1, 1)
    scheduler.add_request(make_request("long", [20] * 100, 200))
    for _ in range(40):
        turn(scheduler, shadow)
    scheduler.add_request(make_request("short", [30] * 8, 30))
    turn(scheduler, shadow)
    assert [request.request_id for request in scheduler.kv_holding_waiting] == ["long"]
    scheduler.finish_requests("long", RequestStatus.FINISHED_ABORTED)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 2
    while scheduler.has_unfinished_requests():
        turn(scheduler, shadow)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"additional_config": {"skipjoin": {"recipe": "nope"}}}, "recipe"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "--pipeline-parallel-size"),
        ({"kv_offloading_size": 1.0}, "other KV connectors"),
        *(
            ({"kv_transfer_config": KVTransferConfig(kv_connector=name, kv_role="kv_both")}, "other KV connectors")
            for name in ("OffloadingConnector", "LMCacheConnectorV1", "NixlConnector", "MultiConnector")
        ),
        ({"kv_transfer_config": tier_config(cpu_gb=-1)}, "cpu_gb must be in"),
        ({"kv_transfer_config": tier_config(cpu=1)}, "did you mean cpu_gb"),
        ({"kv_transfer_config": tier_config(), "scheduler_cls": None}, "needs --scheduler-cls"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_come_with_the_configuration_and_before_the_model(
    model: Path, arguments: dict[str, Any], flag: str
) -> None:
    check_refusal(model, flag, **arguments)


def test_an_unsupported_release_is_refused_before_the_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "METHODS", {**compat.METHODS, "a_new_method": compat.Call()})
    check_refusal(model, "lacks a_new_method, which the Skipjoin scheduler uses: install one of 0.27.1")


def check_refusal(model: Path, message: str, **arguments: Any) -> None:
    """Assert that no configuration is created, and that `vllm serve` ends with one line."""
    before = EngineArgs.create_engine_config
    register()
    register()
    try:
        chosen = {"scheduler_cls": "skipjoin.vllm.Scheduler", **arguments}
        made = EngineArgs(model=str(model), skip_tokenizer_init=True, max_model_len=512, **chosen)
        with pytest.raises(ConfigError, match=message):
            made.create_engine_config()
        with pytest.raises(SystemExit, match=rf"^error: [^\n]*{message}[^\n]*$"):
            made.create_engine_config(UsageContext.OPENAI_API_SERVER)
    finally:
        EngineArgs.create_engine_config = before
