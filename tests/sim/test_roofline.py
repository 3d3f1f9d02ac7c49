from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.config import ConfigError
from skipjoin.core.policy import CostModel
from skipjoin.core.step import StepShape
from skipjoin.sim.hardware import DEVICES, GIB, Device, DeviceGroup, parse_hardware
from skipjoin.sim.models import MODELS, ModelShape, model_shape
from skipjoin.sim.roofline import Efficiency, RooflineCost, check_split, kv_blocks


def cost(model: str, hardware: str, efficiency: Efficiency | None = None) -> RooflineCost:
    return RooflineCost(model_shape(model), parse_hardware(hardware), efficiency or Efficiency())


def decodes(count: int, context: int) -> StepShape:
    return StepShape(decodes=count, context=count * context)


def prefill(tokens: int) -> StepShape:
    return StepShape(prefill=tokens, attention=tokens * (tokens + 1) // 2)


def blocks(model: str, hardware: str, kv_gib: float | None = None, utilization: float = 0.9) -> int:
    return kv_blocks(model_shape(model), parse_hardware(hardware), 16, kv_gib, utilization)


SHAPES = st.builds(StepShape, *[st.integers(0, 10_000)] * 4)
COSTS: list[CostModel] = [
    cost("opt-13b", "a100-40gb"),
    cost("opt-175b", "a100-40gb:tp8pp2"),
    cost("llama-3-8b", "h100-80gb:tp2"),
    cost("qwen3-0.6b", "v100-32gb:pp3"),
    cost("mixtral-8x7b", "h100-80gb:tp2"),
]
every_cost = pytest.mark.parametrize("cost", COSTS, ids=["one GPU", "two servers", "tensor", "pipeline", "experts"])


def test_opt_13b_decodes_in_25_to_30_ms_on_an_a100() -> None:
    """FastServe section 6.1 has a latency bound of 0.3 s for ten iterations. The reference simulation has 24.9 ms."""
    opt = cost("opt-13b", "a100-40gb")
    assert opt.step(decodes(1, 1)) == pytest.approx(24.9e-3, rel=0.02)
    assert opt.step(decodes(4, 300)) < 30e-3
    assert opt.step(decodes(16, 400)) < 35e-3


def test_opt_175b_decodes_in_about_60_ms_on_16_a100() -> None:
    """FastServe section 4.2 uses jobs of 512 tokens and does not state the batch."""
    assert cost("opt-175b", "a100-40gb:tp8pp2").step(decodes(32, 512)) == pytest.approx(60e-3, rel=0.15)


def test_swap_time_of_512_tokens_of_opt_175b() -> None:
    """FastServe section 4.2 has 2.3 GB in 36 ms over PCIe 4.0 x16 at full bandwidth. That is 64 GB/s: both directions
    of one link without coding overhead. One direction takes twice as long, and each of 16 GPUs moves a 16th."""
    kv_bytes = 512 * model_shape("opt-175b").kv_bytes_per_token
    link = DEVICES["a100-40gb"].host_bytes_per_s
    assert kv_bytes / (2 * link) == pytest.approx(36e-3, rel=0.1)
    full = cost("opt-175b", "a100-40gb:tp8pp2", Efficiency(link=1.0, transfer_s=0.0))
    assert full.transfer(512 // 16) == pytest.approx(kv_bytes / link / 16)


def test_prefill_is_linear_in_length() -> None:
    """FastServe figure 5, BROS section 4.2: a line fits where arithmetic dominates, despite attention."""
    opt = cost("opt-13b", "a100-40gb")
    lengths = range(256, 2049, 64)
    seconds = [opt.step(prefill(length)) for length in lengths]
    line = statistics.linear_regression(lengths, seconds)
    deviations = [abs(line.intercept + line.slope * x - actual) for x, actual in zip(lengths, seconds, strict=True)]
    assert max(deviations) < 0.01 * seconds[-1]
    assert statistics.correlation(lengths, seconds) ** 2 > 0.999
    assert seconds[-1] > 8 * opt.step(decodes(1, 1))


def test_faster_memory_decodes_faster() -> None:
    times = [
        cost("opt-13b", name).step(decodes(8, 200))
        for name in sorted(DEVICES, key=lambda name: DEVICES[name].memory_bytes_per_s)
    ]
    assert times == sorted(times, reverse=True)


def test_a_step_is_the_sum_of_its_terms() -> None:
    """The terms of the formula are calculated by hand for one GPU at full efficiency."""
    ideal = Efficiency(memory=1.0, arithmetic=1.0, attention=1.0, link=1.0, layer_s=1e-5, step_s=1e-3, transfer_s=0.0)
    opt, model = cost("opt-13b", "a100-40gb", ideal), model_shape("opt-13b")
    floor = 1e-3 + 40 * 1e-5
    assert opt.step(StepShape()) == pytest.approx(floor + model.weight_bytes / 1555e9)
    assert opt.step(decodes(8, 500)) - opt.step(decodes(8, 0)) == pytest.approx(4000 * 819_200 / 1555e9)
    layers = 40 * 12 * 5120**2
    assert opt.step(StepShape(prefill=1000)) == pytest.approx(floor + 2 * layers * 1000 / 312e12)
    assert opt.step(StepShape(decodes=1000)) == pytest.approx(floor + 2 * model.parameters * 1000 / 312e12)
    pairs = opt.step(StepShape(attention=10**6)) - opt.step(StepShape())
    assert pairs == pytest.approx(10**6 * 40 * 4 * 5120 / 312e12)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    """Calculated by hand for Mixtral, each of whose 32 layers has 8 experts of 3 x 4096 x 14336 parameters."""
    ideal = Efficiency(memory=1.0, arithmetic=1.0, layer_s=0.0, step_s=0.0)
    mixtral, expert = cost("mixtral-8x7b", "h200-141gb", ideal), 3 * 4096 * 14336
    dense = 32 * (2 * 4096 * 128 * 40 + 8 * 4096) + 32000 * 4096
    for tokens, used in ((1, 2), (2, 3.5), (1000, 8)):
        seconds = mixtral.step(StepShape(decodes=tokens))
        read = 2 * (dense + 32 * used * expert) / 4.8e12
        work = 2 * tokens * (dense + 32 * 2 * expert) / DEVICES["h200-141gb"].flops_per_s
        assert seconds == pytest.approx(max(read, work))


def test_links_between_gpus_add_to_a_step() -> None:
    """Calculated by hand for 4,000 tokens of OPT-66B, 18,432 bytes each: two all-reduces in each of 64 layers, in which
    a ring of two GPUs sends every byte once over NVLink, and one hop over NVLink or the network."""
    ideal, shape = Efficiency(arithmetic=1.0, link=1.0, layer_s=0.0, step_s=0.0), StepShape(prefill=4000)
    arithmetic = 64 * 2 * 12 * 9216**2 * 4000 / 312e12
    reduces = 128 * (8e-6 + 4000 * 18_432 / 300e9)
    assert cost("opt-66b", "a100-80gb:tp2", ideal).step(shape) == pytest.approx(arithmetic / 2 + reduces)
    near, far = 8e-6 + 4000 * 18_432 / 300e9, 30e-6 + 4000 * 18_432 / 50e9
    assert cost("opt-66b", "a100-80gb:pp2", ideal).step(shape) == pytest.approx(arithmetic + near)
    assert cost("opt-66b", "a100-80gb:pp9", ideal).step(shape) == pytest.approx(arithmetic + 8 * far)
    # With eight GPUs each byte is sent 7/4 times over a tree of depth three.
    reduces = 128 * (24e-6 + 4000 * 18_432 * 1.75 / 300e9)
    assert cost("opt-66b", "a100-80gb:tp8", ideal).step(shape) == pytest.approx(arithmetic / 8 + reduces)


def test_a_decode_alongside_a_prefill_is_nearly_free() -> None:
    """Chunked prefill relies on reading the weights once."""
    opt = cost("opt-13b", "a100-40gb")
    separate = opt.step(prefill(128)) + opt.step(decodes(16, 200))
    assert opt.step(StepShape(*map(sum, zip(prefill(128), decodes(16, 200), strict=True)))) < 0.65 * separate


@pytest.mark.parametrize("model", [name for name, shape in MODELS.items() if shape.read_bytes(1) > 20e9])
@pytest.mark.parametrize("shape", [decodes(1, 100), decodes(64, 500), prefill(1024)], ids=["one", "many", "prefill"])
def test_tensor_parallelism_speeds_up_large_models(model: str, shape: StepShape) -> None:
    splits = [tp for tp in (1, 2, 4, 8) if model_shape(model).kv_heads % tp == 0]
    times = [cost(model, f"a100-80gb:tp{tp}").step(shape) for tp in splits]
    assert times == sorted(times, reverse=True)
    # All-reduces and launches do not shrink, so the speedup is less than linear.
    assert times[-1] > times[0] / splits[-1]


def test_stages_do_not_shorten_a_step() -> None:
    one, two = cost("opt-66b", "a100-80gb:tp2"), cost("opt-66b", "a100-80gb:tp2pp2")
    assert (one.stages, two.stages) == (1, 2)
    assert one.step(decodes(8, 200)) < two.step(decodes(8, 200)) < 1.01 * one.step(decodes(8, 200))


def test_the_gpus_share_the_transfer_of_a_block() -> None:
    bare = Efficiency(transfer_s=0.0)
    one = cost("opt-13b", "a100-40gb", bare).transfer(100)
    assert cost("opt-13b", "a100-40gb:tp2pp2", bare).transfer(100) == pytest.approx(one / 4)
    assert cost("opt-13b", "h100-80gb", bare).transfer(100) == pytest.approx(one / 2)


@every_cost
@given(one=SHAPES, more=SHAPES)
def test_step_cost_is_monotonic_and_subadditive(cost: CostModel, one: StepShape, more: StepShape) -> None:
    both = cost.step(StepShape(*map(sum, zip(one, more, strict=True))))
    assert max(cost.step(one), cost.step(more)) <= both <= cost.step(one) + cost.step(more)


@every_cost
@given(count=st.integers(0, 1000), more=st.integers(1, 1000))
def test_transfer_cost_is_monotonic_and_subadditive(cost: CostModel, count: int, more: int) -> None:
    assert 0 < cost.transfer(count) < cost.transfer(count + more) <= cost.transfer(count) + cost.transfer(more)


def test_kv_pools_match_the_papers() -> None:
    # The 13,424 tokens that the reference simulation states are 11e9 bytes; 11 GiB are more.
    assert 16 * blocks("opt-13b", "a100-40gb", 11e9 / GIB) == 13_424
    assert 16 * blocks("opt-13b", "a100-40gb", 11) == 14_416
    # EconoServe section 4.1: 264 GB alongside OPT-175B on eight A100-80GB.
    assert blocks("opt-175b", "a100-80gb:tp8", 264e9 / GIB) <= blocks("opt-175b", "a100-80gb:tp8")
    # ALISE section 4.1 serves OPT-13B on one V100-32GB, which has space for few requests.
    assert 4_000 < 16 * blocks("opt-13b", "v100-32gb") < 8_000


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("split", ["", ":tp2", ":tp4pp5", ":tp8pp2"])
def test_the_kv_pool_is_limited_by_the_fullest_gpu(name: str, split: str) -> None:
    group, model = parse_hardware(name + split), model_shape("opt-30b")
    layers = -(-48 // group.pp)
    try:
        fitting = blocks("opt-30b", name + split)
    except ConfigError:
        fitting = 0
    weights = (layers * model.layer_parameters + model.head_parameters) * 2 / group.tp
    kv = fitting * 16 * model.kv_bytes_per_token * layers / 48 / group.tp
    share = 0.9 * group.device.memory_bytes
    assert (weights + kv <= share) if fitting else (weights > 0.98 * share)
    # Only activations and less than a block remain unused.
    assert not fitting or weights + kv > share - 0.4 * GIB


@given(
    model=st.sampled_from(list(MODELS.values())),
    device=st.sampled_from(list(DEVICES.values())),
    tp=st.integers(1, 8),
    pp=st.integers(1, 8),
)
def test_the_error_names_hardware_that_suffices(model: ModelShape, device: Device, tp: int, pp: int) -> None:
    group = DeviceGroup(device, tp, pp)
    try:
        assert kv_blocks(model, group, 16) > 0
    except ConfigError as error:
        text = str(error)
        if "nearest" in text:
            check_split(model, DeviceGroup(device, int(text.rpartition(" ")[2]), pp))
            return
        names = text.rpartition("; ")[2].removesuffix(" would do").split(" or ")
        assert parse_hardware(names[0]).device is device
        assert parse_hardware(names[0]).gpus > 1
        for name in names:
            assert kv_blocks(model, parse_hardware(name), 16) > 0


@pytest.mark.parametrize(
    ("model", "hardware", "kv_gib", "error"),
    [
        ("opt-30b", "v100-32gb", None, "opt-30b has 55.8 GiB.*28.8 GiB.*; v100-32gb:tp2 or a100-80gb would do$"),
        ("opt-175b", "a100-40gb", None, "opt-175b has 325.2 GiB.*36.0 GiB of it"),
        ("opt-175b", "a100-40gb:tp8", None, "each GPU of a100-40gb:tp8 needs 40"),
        (
            "llama-33b",
            "a100-80gb:tp8",
            None,
            "the 52 key-value heads of llama-33b, got 8; the nearest valid value is 4$",
        ),
        ("opt-13b", "a100-40gb:tp3", None, "the nearest valid value is 4$"),
        ("opt-13b", "a100-40gb:pp41", None, "pp must be at most 40, the layers of opt-13b, got 41$"),
        ("opt-13b", "a100-40gb", 20, r"kv_gib must be in \[0.0122, 15.8"),
        ("opt-13b", "a100-40gb", 0.001, r"kv_gib must be in \[0.0122, 15.8"),
        ("opt-13b", "a100-40gb", float("nan"), r"kv_gib must be in \(0, "),
    ],
)
def test_models_that_do_not_fit_are_refused(model: str, hardware: str, kv_gib: float | None, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        blocks(model, hardware, kv_gib)


def test_settings_out_of_bounds_are_refused() -> None:
    model, group = model_shape("opt-13b"), parse_hardware("a100-40gb")
    with pytest.raises(ConfigError, match="utilization must be in"):
        kv_blocks(model, group, 16, None, 1.5)
    with pytest.raises(ConfigError, match="block_size must be at least 1, got 0"):
        kv_blocks(model, group, 0)
    with pytest.raises(ConfigError, match="block_size must be at least 1, got 0"):
        RooflineCost(model, group, block_size=0)
    with pytest.raises(ConfigError, match="tp must divide"):
        RooflineCost(model, DeviceGroup(group.device, 7))
