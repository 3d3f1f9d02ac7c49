from __future__ import annotations

import dataclasses
import inspect
import json

import pytest
import torch
from attention_cases import SCALE, Case, assert_near, shape
from model_zoo import VOCAB, PagedRunner, save_reference

from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from skipjoin.model.parallel import WHOLE

pytest.importorskip("triton")

from skipjoin.model.attention import triton_backend
from skipjoin.model.attention.base import HeadWeights
from skipjoin.model.attention.triton_backend import TritonAttention, check_triton_attention
from skipjoin.model.kernels import choices
from skipjoin.model.kernels import prefill_attention as prefill
from skipjoin.model.kernels.choices import Shape, decode_choice, tune_attention
from skipjoin.model.kernels.decode_attention import CHUNK_KEYS, MAX_CHUNKS, decode_configs, share_out
from skipjoin.model.kernels.norms import normalize
from skipjoin.model.kernels.paged import INTERPRETED
from skipjoin.model.kernels.prefill_attention import prefill_configs, query_tiles
from skipjoin.model.kernels.tuning import TunedTable
from support.worlds import exhaustive, one_in

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Tolerances of half types account for the result, the weights as operands, and the stored rotated keys.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="no CUDA device, Triton not interpreted")

# (heads, kv_heads, head_dim, block_size, rotary_dim)
SHAPES = {
    "opt": (3, 3, 40, 16, 0),
    "mha": (2, 2, 64, 5, 16),
    "gqa3": (6, 2, 80, 8, 80),
    "gqa4": (4, 1, 128, 16, 128),
    "gqa8": (8, 1, 64, 1, 64),
}
MIX = [(30, 1), (0, 20), (64, 9), (0, 1)]
SIXTEENS = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2}
LONG = [(700, 1), (3, 1), (1500, 1), (0, 1)]


class Always(TunedTable):
    """Tuning table that always chooses the config of a given number, or the last one."""

    def __init__(self, number: int) -> None:
        super().__init__(None)
        self.number = number

    def find(self, name, source, key, configs):
        return configs[min(self.number, len(configs) - 1)]


def case(shape: str, mix, **options) -> Case:
    heads, kv_heads, dim, block_size, rotary = SHAPES[shape]
    return Case(heads, kv_heads, dim, mix, **{"block_size": block_size, "rotary": rotary, "device": DEVICE, **options})


@pytest.mark.parametrize("shape", one_in(3, sorted(SHAPES)))
def test_mixed_batches(shape):
    backend = TritonAttention()
    case(shape, MIX, window=11).check(backend, 1e-5)
    case(shape, MIX, ends="both", seed=1).check(backend, 1e-5)


@pytest.mark.parametrize(("shape", "dtype"), [("opt", torch.bfloat16), exhaustive("gqa4", torch.float16)], ids=str)
def test_half_types(shape, dtype):
    case(shape, MIX, dtype=dtype, ends="both").check(TritonAttention(), TOLERANCE[dtype])


@pytest.mark.parametrize("shape", ["gqa3", *map(exhaustive, ("mha", "gqa4"))])
def test_int8_cache(shape):
    # A new key that rounds differently as bfloat16 may get other codes.
    case(shape, MIX, dtype=torch.bfloat16, cache="int8", ends="both").check(TritonAttention(), 2e-2)
    case(shape, [(700, 1), (9, 1)], cache="int8", window=600).check(TritonAttention(), 1e-2)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("mha", {}),
        exhaustive("gqa3", {"cache": "int8"}),
        exhaustive("opt", {}),
        exhaustive("gqa4", {"dtype": torch.bfloat16}),
    ],
)
def test_norms_of_heads_are_those_of_a_kernel_of_their_own(shape, options):
    """Heads without rotation, and with some or all values rotated; padding has no keys, but queries."""
    one, other = (case(shape, [(30, 1), (0, 9)], **options) for _ in range(2))
    heads, kv_heads, dim = SHAPES[shape][:3]
    draw = torch.Generator().manual_seed(1)
    weights = [torch.rand(dim, generator=draw).to(DEVICE, one.dtype) for _ in range(2)]
    found = []
    for fused, of in ((True, one), (False, other)):
        query, key, value = of.qkv.clone().to(DEVICE).split([heads, kv_heads, kv_heads], dim=1)
        given = {"norms": HeadWeights(*weights, 1e-3, 0.5)} if fused else {}
        if not fused:
            query, key = (
                normalize(x, weight, None, 1e-3, centre=False, offset=0.5)
                for x, weight in zip((query, key), weights, strict=True)
            )
        given |= {"layer": 1, "scale": SCALE, "cos_sin": of.cos_sin}
        out = TritonAttention().attend(query, key, value, of.kv, of.batch, **given)
        found.append((out, *of.kv.read(1, (slice(None),), torch.float32)))
    tolerance = TOLERANCE[one.dtype] if "cache" not in options else 1e-2
    for ours, expected in zip(*found, strict=True):
        assert_near(ours.nan_to_num(0), expected.nan_to_num(0).double().cpu(), tolerance)


@pytest.mark.parametrize(("shape", "cache"), [exhaustive("mha", "auto"), ("gqa3", "int8")])
def test_caps_and_sinks(shape, cache):
    sinks = 3 * torch.randn(SHAPES[shape][0], generator=torch.Generator().manual_seed(0))
    # The context of the first decode is split between programs.
    mixed = case(shape, [(300, 1), (9, 1), (3, 9), (0, 1)], cap=2.5, sinks=sinks, cache=cache, ends="both")
    mixed.check(TritonAttention(), 1e-5 if cache == "auto" else 1e-2)


@pytest.mark.parametrize(("shape", "window"), [exhaustive("mha", 0), ("gqa3", 900)])
def test_contexts_are_split_between_programs(shape, window):
    """Programs have several items each, or there are more programs than items."""
    long = case(shape, LONG, window=window, ends="both")
    long.check(TritonAttention(processors=132 if window else 1), 1e-5)


def test_chunks_of_a_subset_of_segments():
    case("gqa4", [(300, 1), (0, 5), (290, 1)]).check(TritonAttention(processors=132), 1e-5)


class Decodes:
    """Work list of decodes with given contexts, and its items as (segment, first key, end)."""

    def __init__(self, contexts, segments=None, window=0, chunk=CHUNK_KEYS):
        tables = [[0] * -(-context // 16) for context in contexts]
        new = [Segment([0], context - 1, table) for context, table in zip(contexts, tables, strict=True)]
        index = None if segments is None else torch.tensor(segments, device=DEVICE)
        self.list = share_out(PackedBatch.build(new, 16, DEVICE), index, window=window, chunk=chunk)
        records = self.list.items[: int(self.list.total)].tolist()
        self.items = [(record[0], record[2], record[3]) for record in records]
        self.keys = [end - begin for _, begin, end in self.items]

    def chunks(self, number):
        """Return the chunks of the sequence at this index of the segments, in the order of summation."""
        first, chunks, token, _ = self.list.sequences[number].tolist()
        found = self.items[first : first + chunks]
        assert [segment for segment, *_ in found] == [token] * chunks
        return [(begin, end) for _, begin, end in found]


def test_long_contexts_are_split_evenly_between_programs():
    contexts = [500 + i for i in range(63)]
    contexts.insert(20, 32_768)
    work = Decodes(contexts)
    assert max(work.keys) <= 2 * CHUNK_KEYS  # 32 blocks of 2048
    assert work.keys[:64] == [512] * 64  # these start first
    # Items are assigned to the GPU's programs in this order. No program may have far more work than the others.
    programs = [sum(work.keys[i::132]) for i in range(132)]
    assert sum(programs) == sum(contexts)
    assert max(programs) <= sum(contexts) / 132 + 2 * CHUNK_KEYS
    for number, context in enumerate(contexts):
        chunks = work.chunks(number)
        assert [begin for begin, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
        assert chunks[-1][1] == context


def test_chunks_do_not_depend_on_other_sequences():
    edges = [1, 2, CHUNK_KEYS, CHUNK_KEYS + 1, 5000, CHUNK_KEYS * MAX_CHUNKS, CHUNK_KEYS * MAX_CHUNKS + 1, 131_072]
    for window in (0, 700):
        together = Decodes(edges, window=window)
        some = Decodes(edges, [7, 4, 1], window=window)
        # More sequences than a program reads at once.
        many = Decodes([*edges, *[300] * 125], window=window) if window else together
        for number, context in enumerate(edges):
            alone = Decodes([context], window=window).chunks(0)
            assert together.chunks(number) == many.chunks(number) == alone
            assert len(alone) <= MAX_CHUNKS
            assert alone[0][0] == (max(context - window, 0) if window else 0)
            assert alone[-1][1] == context
        assert [some.chunks(i) for i in range(3)] == [together.chunks(i) for i in (7, 4, 1)]
        assert len(some.items) == sum(len(some.chunks(i)) for i in range(3))


@pytest.mark.parametrize(("shape", "count"), [exhaustive("opt", 6), exhaustive("gqa4", 5)])
def test_every_config_produces_the_same_output(shape, count):
    heads, kv_heads, dim = SHAPES[shape][:3]
    assert len(decode_configs(heads // kv_heads, dim, 2)) == count
    assert max(len(prefill_configs(heads // kv_heads, dim, 2, rows)) for rows in (9, 900)) <= count
    for number in range(1, count):
        case(shape, [(40, 1), (7, 20)], dtype=torch.bfloat16).check(TritonAttention(Always(number)), 1e-2)


@pytest.mark.parametrize("work", [1, 4096])
def test_batches_split_contexts_as_the_device_measured(work):
    """Small batches may get shorter chunks and large ones longer ones, whose sums need no second kernel."""
    default, *_, other = decode_choice(Shape(torch.float32, 1, 64, 16), work)[-1]
    assert default["CHUNK"] == CHUNK_KEYS
    assert other["CHUNK"] == (64 if work == 1 else 1024)

    class Measured(TunedTable):
        def find(self, name, source, key, configs):
            return {**configs[0], "CHUNK": other["CHUNK"]} if name == "decode" else configs[0]

    mix = [(600, 1), (3, 1), (100, 3)]
    case("mha", mix, window=250, block_size=16, ends="both").check(TritonAttention(Measured(None)), 1e-5)
    long = Decodes([600, 1, 1500], chunk=other["CHUNK"])
    assert [len(long.chunks(i)) for i in range(3)] == ([10, 1, 24] if work == 1 else [1, 1, 2])


def test_padding_writes_no_kv_and_outputs_zeros():
    for name in ("opt", "gqa4"):
        padded = case(name, [(40, 1), (0, 1), (20, 1), (0, 1)])
        slots, context = padded.batch.slots.clone(), padded.batch.context_lens.clone()
        slots[[1, 3]], context[[1, 3]] = -1, 0
        padded.batch = dataclasses.replace(padded.batch, slots=slots, context_lens=context)
        block, slot = (padded.batch.block_tables[[1, 3], 0].cpu(), 0)
        padded.full.layer(1)[0][block, slot] = torch.nan
        padded.full.layer(1)[1][block, slot] = torch.nan
        padded.expected[[1, 3]] = 0
        for processors in (1, 132):
            padded.check(TritonAttention(processors=processors), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, exhaustive(torch.float32)], ids=str)
def test_self_test(dtype):
    assert check_triton_attention(TritonAttention(), dtype, DEVICE)

    class Forgetful(TritonAttention):
        def attend(self, *arguments, window, **options):
            return super().attend(*arguments, **options)

    assert not check_triton_attention(Forgetful(), torch.float32, DEVICE)


def test_torch_attends_with_heads_that_are_too_wide_for_the_kernels():
    Case(2, 1, 320, [(0, 1), (3, 5)], device=DEVICE).check(TritonAttention(), 1e-5)
    with pytest.raises(ValueError, match="batch_invariant needs heads of at most 256 numbers, got 320"):
        Case(1, 1, 320, [(0, 1)], device=DEVICE).check(TritonAttention(invariant=True), 1e-5)


def test_tiles_cover_every_token_and_start_with_the_longest():
    batch = case("opt", [(5, 1), (0, 20), (64, 9)]).batch
    assert query_tiles(batch, [1, 2], 8).tolist() == [[2, 8], [2, 0], [1, 16], [1, 8], [1, 0]]


@pytest.mark.skipif(DEVICE == "cuda", reason="counts the interpreter's calls")
@pytest.mark.parametrize("window", [70, 9])
def test_windows_read_and_mask_only_the_tiles_they_touch(window, monkeypatch):
    """Tiles of 16 keys and 16 tokens: a token's window begins in another tile than that of the tile's last token."""
    names = inspect.getfullargspec(prefill._tiles.fn).args
    visited, tiles = {True: 0, False: 0}, prefill._tiles

    def counted(*given):
        of = dict(zip(names, given, strict=True))
        low, high = (int(of[name].handle.data[0]) for name in ("low", "high"))
        visited[bool(of["MASKED"])] += max(0, -(-(high - low) // 16))
        return tiles(*given)

    monkeypatch.setattr(prefill, "_tiles", counted)
    monkeypatch.setattr(triton_backend, "prefill_choice", lambda *_: ("prefill", "", (), [SIXTEENS]))
    Case(1, 1, 16, [(80, 40)], window=window, block_size=16, device=DEVICE).check(TritonAttention(), 1e-5)
    touched, masked = 0, 0
    for first in (80, 96, 112):
        tokens = range(first, min(first + 16, 120))
        for low in range(0, 120, 16):
            sees = [own - window < key <= own for own in tokens for key in range(low, low + 16)]
            touched += any(sees)
            masked += any(sees) and not all(sees)
    assert (visited[True], visited[False]) == (masked, touched - masked)
    assert (visited[False] > 0) == (window == 70)


def test_tuned_sizes_are_used(monkeypatch):
    monkeypatch.setattr(choices, "_CONTEXT", 64)
    monkeypatch.setattr(choices, "_DECODES", (1, 4, 16))
    calls = []

    def timer(call, turns):
        assert turns == 20
        if len(calls) < 6:  # those of the first key; later ones are too large to interpret
            call(0)
        calls.append(call)
        return -len(calls)

    table, shape = TunedTable(None, timer), Shape(torch.float32, 1, 16, 8)
    tune_attention(table, shape, 2, torch.device(DEVICE), 4, 0)
    measured = len(calls)
    tune_attention(table, shape, 2, torch.device(DEVICE), 4, 0)
    assert len(calls) == measured
    for work in (1, 2, 5, 8, 33, 64):
        name, source, key, configs = decode_choice(shape, work)
        assert table.find(name, source, key, configs) == (configs[0] if work == 1 else configs[-1])
    Case(2, 2, 16, MIX, device=DEVICE).check(TritonAttention(table), 1e-5)


@pytest.mark.parametrize("name", [exhaustive("opt"), exhaustive("qwen3"), "gemma2"])
def test_logits_equal_those_of_torch_attention(name, tmp_path):
    reference = save_reference(name, tmp_path)
    model = load_model(tmp_path, LoadSpec(dtype="float32", attention="torch", device=DEVICE))
    model.attention = TritonAttention()
    ids = [[i * 7 % VOCAB for i in range(n)] for n in (1, 5, 12)]
    for tokens, ours in zip(ids, PagedRunner(model, ids, 4, seed=1).run(), strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours.cpu(), expected, atol=1e-4 if DEVICE == "cpu" else 1e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
class TestOnTheCard:
    """The same checks at sizes of production models."""

    @pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (40, 40, 128), (12, 12, 64), (16, 2, 256)])
    @pytest.mark.parametrize("window", [0, 500])
    def test_sizes(self, heads, kv_heads, dim, dtype, window):
        mix = [(2000, 1), (4000, 1), (0, 700), (900, 130), (17, 1), (0, 2)]
        options = {"dtype": dtype, "block_size": 16, "window": window, "ends": "both", "rotary": dim, "device": "cuda"}
        tolerance = TOLERANCE[dtype]
        Case(heads, kv_heads, dim, mix, **options).check(TritonAttention(), tolerance)
        Case(heads, kv_heads, dim, [(s, 1) for s in range(0, 3000, 250)], **options).check(TritonAttention(), tolerance)

    def test_tuning_measures_and_saves_configs(self, tmp_path):
        config, device = shape(8, 2, 64), torch.device("cuda")
        path = tmp_path / "table.json"
        TritonAttention(TunedTable(path)).tune(config, torch.bfloat16, device, 16, WHOLE)
        assert len(json.loads(path.read_text())) == 7
        attention = TritonAttention(TunedTable(path, timer=None))
        attention.tune(config, torch.bfloat16, device, 16, WHOLE)
        Case(8, 2, 64, MIX, dtype=torch.bfloat16, block_size=16, device="cuda").check(attention, 1e-2)

    def test_replayed_graph_follows_the_index_tensors(self):
        options = {"dtype": torch.bfloat16, "block_size": 16, "rotary": 128, "device": "cuda"}
        first = Case(32, 8, 128, [(900, 1), (30, 1), (400, 1)], **options)
        second = Case(32, 8, 128, [(500, 1), (901, 1), (3, 1)], ends="both", seed=2, **options)
        width = 80
        tables = torch.zeros((3, width), dtype=torch.int64, device="cuda")
        batch = dataclasses.replace(
            first.batch,
            block_tables=tables,
            **{n: getattr(first.batch, n).clone() for n in ("slots", "positions", "context_lens", "reversed")},
        )
        # One cache for both, because the graph contains its address.
        kv = max(first.kv, second.kv, key=lambda kv: kv.num_blocks)
        cos_sin = torch.empty((1000, 128), device="cuda")
        qkv = torch.empty_like(first.qkv, device="cuda")
        backend, parts = TritonAttention(), qkv.split([32, 8, 8], dim=1)

        def load(case: Case, past: torch.Tensor) -> None:
            kv.tensor[: past.shape[0]].copy_(past)
            tables.zero_()[:, : case.batch.block_tables.shape[1]] = case.batch.block_tables
            for name in ("slots", "positions", "context_lens", "reversed"):
                getattr(batch, name).copy_(getattr(case.batch, name))
            cos_sin[: case.cos_sin.shape[0]].copy_(case.cos_sin)
            qkv.copy_(case.qkv)

        pasts = [c.kv.tensor.clone() for c in (first, second)]
        attend = {"layer": 1, "scale": SCALE, "cos_sin": cos_sin}
        load(first, pasts[0])
        backend.attend(*parts, kv, batch, **attend)
        graph = torch.cuda.CUDAGraph()
        load(first, pasts[0])
        with torch.cuda.graph(graph):
            out = backend.attend(*parts, kv, batch, **attend)
        for case, past in zip((first, second, first), (*pasts, pasts[0]), strict=True):
            load(case, past)
            graph.replay()
            assert_near(out, case.expected, 1e-2)
