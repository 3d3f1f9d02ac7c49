from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from skipjoin.model.draws import largest_first, uniform
from skipjoin.model.logits_processors import Asked, ProcessorState
from skipjoin.model.sampler import Sampled, Sampler, SampleRow, prompt_logprobs
from skipjoin.sampling import BadWords, SamplingParams, ThinkingBudget

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
VOCAB = 1000
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 3


class Row(NamedTuple):
    params: SamplingParams
    seed: int
    prompt: Sequence[int]
    output: Sequence[int]
    eos: Sequence[int]


def row(*, seed=0, prompt=(1, 2, 3), output=(), eos=(2,), **params) -> Row:
    return Row(SamplingParams(**params), seed, prompt, output, eos)


def sampled(logits: torch.Tensor, rows: Sequence[Row]) -> list[Sampled]:
    sampler = Sampler(logits.shape[-1])
    return sampler.sample(logits.clone(), [started(sampler, row) for row in rows]).report.read()


def started(sampler: Sampler, one: Row) -> SampleRow:
    state = sampler.start(one.params, one.seed, one.prompt, one.eos)
    state.accept(one.output)
    return SampleRow(state, len(one.output))


def draw(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    return [sample.token for sample in sampled(logits.expand(len(rows), -1), rows)]


def naive_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return probabilities after temperature and filters, computed token by token in float64."""
    weights = (logits.double() / params.temperature).softmax(-1)
    order = weights.argsort(descending=True).tolist()
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= params.top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    kept = [i for i in kept if weights[i] >= params.min_p * weights[order[0]]]
    result = torch.zeros_like(weights)
    result[kept] = weights[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 7},
        {"top_p": 0.7},
        {"temperature": 2.0, "top_p": 0.999},
        {"min_p": 0.05},
        {"top_k": 400, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
        {"top_k": 5000},
    ],
    ids=str,
)
def test_samples_follow_the_distribution(params):
    count = 4_000
    expected = naive_distribution(LOGITS, SamplingParams(**params)) * count
    rows = [row(seed=i, **params) for i in range(500)]
    seen = torch.zeros(VOCAB)
    for step in range(count // len(rows)):
        shifted = [r._replace(output=range(step)) for r in rows]
        seen += torch.bincount(torch.tensor(draw(LOGITS, shifted)), minlength=VOCAB)
    assert seen[expected == 0].sum() == 0
    large = expected > 5
    rest = max(float(expected[~large].sum()), 1e-9)
    statistic = ((seen - expected)[large] ** 2 / expected[large]).sum() + (seen[~large].sum() - rest) ** 2 / rest
    degrees = int(large.sum())
    assert statistic < degrees + 5 * math.sqrt(2 * degrees) + 10


def test_uniform_is_uniform_and_a_function_of_seed_and_position():
    values = torch.tensor([uniform(seed, position) for seed in range(-50, 50) for position in range(100)])
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01
    assert len(values.unique()) > 9900
    pairs = values.view(100, 100).double()
    assert abs(torch.corrcoef(torch.stack([pairs[:, :-1].flatten(), pairs[:, 1:].flatten()]))[0, 1]) < 0.05


def test_samples_do_not_depend_on_the_batch():
    kinds = [
        {},
        {"temperature": 0},
        {"top_p": 0.5},
        {"top_k": 3, "temperature": 1.7},
        {"min_p": 0.1},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"logit_bias": {7: 20.0}},
        {"allowed_token_ids": tuple(range(0, 400, 3)), "bad_words": BadWords(((3,), (6,)))},
        {"min_tokens": 9, "logprobs": 2},
        {"top_p": 0.9999, "temperature": 2.0},
    ]
    logits = torch.randn(36, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    rows = [row(seed=i, output=list(range(i % 5)), **kinds[i % len(kinds)]) for i in range(36)]
    together = sampled(logits, rows)
    alone = [sampled(logits[i : i + 1], rows[i : i + 1])[0] for i in range(36)]
    order = torch.randperm(36, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = sampled(logits[order], [rows[i] for i in order])
    assert [s.token for s in together] == [s.token for s in alone]
    assert [s.token for s in shuffled] == [together[i].token for i in order]


def test_samples_depend_on_seed_and_position():
    by_seed = draw(LOGITS, [row(seed=i) for i in range(40)])
    by_position = draw(LOGITS, [row(output=range(i)) for i in range(40)])
    assert len(set(by_seed)) > 5
    assert len(set(by_position)) > 5
    # Only the position matters, not the boundary between prompt and output.
    assert draw(LOGITS, [row(prompt=(1,), output=(2, 3))]) == draw(LOGITS, [row(prompt=(1, 2, 3))])


def test_greedy_sampling_takes_the_largest_logit():
    logits = torch.randn(5, VOCAB)
    rows = [row(temperature=0)] * 4 + [row(temperature=0, logit_bias={9: 100.0})]
    tokens = [s.token for s in sampled(logits, rows)]
    assert tokens == [*logits[:4].argmax(-1).tolist(), 9]
    assert sampled(logits[:0], []) == []


@pytest.mark.parametrize("temperature", [0, 1e-4])
def test_penalties(temperature):
    generator = torch.Generator().manual_seed(4)
    for trial in range(20):
        logits = torch.randn(30, generator=generator)
        prompt = torch.randint(0, 30, (6,), generator=generator).tolist()
        output = torch.randint(0, 30, (8,), generator=generator).tolist()
        params = {
            "temperature": temperature,
            "repetition_penalty": 1.0 + trial / 10,
            "presence_penalty": 0.3 * (trial % 3),
            "frequency_penalty": 0.2 * (trial % 4),
            "logit_bias": {trial: 0.7, 500: 3.0},
        }
        expected = logits.tolist()
        expected[trial] += 0.7
        for token in set(prompt + output):
            factor = params["repetition_penalty"]
            expected[token] = expected[token] / factor if expected[token] > 0 else expected[token] * factor
        for token in set(output):
            expected[token] -= params["frequency_penalty"] * output.count(token) + params["presence_penalty"]
        best = max(range(30), key=expected.__getitem__)
        assert draw(logits, [row(prompt=prompt, output=output, **params)]) == [best]


def test_advanced_states_equal_states_made_from_all_tokens():
    """States advance with their requests, but are made from all tokens on a restarted rank."""
    generator = torch.Generator().manual_seed(5)
    kinds = [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.3},
        {"presence_penalty": -0.4, "repetition_penalty": 0.8},
        {"max_tokens": 60, "min_tokens": 40, "logit_bias": {3: 1.5}},
        {},
    ]
    sampler = Sampler(30)
    states = [sampler.start(SamplingParams(**kind), 7, (1, 2, 3), (2,)) for kind in kinds]
    outputs: list[list[int]] = [[] for _ in kinds]
    for _ in range(60):
        logits = torch.randn(len(kinds), 30, generator=generator)
        rows = [SampleRow(state, len(output)) for state, output in zip(states, outputs, strict=True)]
        tokens = sampler.sample(logits.clone(), rows).tokens.tolist()
        again = [row(seed=7, output=output, **kind) for output, kind in zip(outputs, kinds, strict=True)]
        assert [sample.token for sample in sampled(logits, again)] == tokens
        for state, output, token in zip(states, outputs, tokens, strict=True):
            output.append(token)
            state.accept([token])
    assert max(map(len, map(set, outputs))) > 16  # large enough that the arrays of seen tokens grew


class Alternating:
    """Logits processor that allows even tokens after odd ones and vice versa: a small constraint with state."""

    class State(ProcessorState):
        reads_output = True

        def __init__(self, last: int) -> None:
            self.last = last

        def accept(self, tokens: Sequence[int]) -> None:
            self.last = tokens[-1] if tokens else self.last

    def start(self, asked: Asked) -> State | None:
        return self.State(asked.prompt[-1]) if asked.params.min_p else None

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, State]]) -> None:
        for i, state in rows:
            logits[i, state.last % 2 :: 2] = -torch.inf


def test_logits_processors_constrain_only_their_requests():
    sampler = Sampler(30, processors=[Alternating()])
    states = [sampler.start(SamplingParams(min_p=min_p), seed, (0,)) for seed, min_p in enumerate((0.01, 0.0))]
    outputs: list[list[int]] = [[], []]
    for _ in range(40):
        tokens = sampler.sample(torch.zeros(2, 30), [SampleRow(state, len(outputs[0])) for state in states]).tokens
        for state, output, token in zip(states, outputs, tokens.tolist(), strict=True):
            output.append(token)
            state.accept([token])
    assert [token % 2 for token in outputs[0]] == [1, 0] * 20
    assert [token % 2 for token in outputs[1]] != [1, 0] * 20


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-300, 5e-324])
def test_temperatures_near_zero_are_greedy(temperature):
    logits = 100 * torch.randn(8, 300, generator=torch.Generator().manual_seed(7))
    filters = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}] * 2
    rows = [row(temperature=temperature, **some) for some in filters]
    tokens = [s.token for s in sampled(logits, rows)]
    assert tokens == logits.argmax(-1).tolist()


def test_min_tokens_bans_stop_tokens_until_reached():
    logits = torch.zeros(10)
    logits[[2, 5]] = torch.tensor([20.0, 19.0])
    ending = {"min_tokens": 3, "temperature": 0, "stop_token_ids": (5, 99)}
    assert draw(logits, [row(output=(1, 1), **ending)])[0] not in (2, 5)
    assert draw(logits, [row(output=(1, 1, 1), **ending)]) == [2]
    # An end-of-sequence token that does not stop the request is not banned.
    assert draw(logits, [row(output=(1, 1), ignore_eos=True, **ending)]) == [2]
    assert draw(logits, [row(temperature=0, logit_bias={2: -100.0})]) == [5]


def test_tokens_and_words_are_banned():
    logits = torch.zeros(10)
    logits[[2, 5, 7]] = torch.tensor([20.0, 19.0, 18.0])
    rows = [
        row(temperature=0, allowed_token_ids=(5, 7, 9)),
        row(temperature=0, bad_words=BadWords(((2,), (3, 5), (4, 4, 7), (8, 99))), output=(3,)),
        row(temperature=0, bad_words=BadWords(((2,), (3, 5), (4, 4, 7), (8, 99))), output=(3, 4)),
        row(temperature=0, allowed_token_ids=(5, 7), bad_words=BadWords(((1, 4, 5),)), output=(1, 4)),
        row(temperature=0),
    ]
    assert draw(logits, rows) == [5, 7, 5, 7, 2]
    rows = [row(seed=seed, temperature=2.0, allowed_token_ids=(0, 1)) for seed in range(40)]
    assert set(draw(logits, rows)) == {0, 1}


def test_reasoning_is_closed_after_its_budget():
    logits = torch.zeros(10)
    logits[5] = 9.0

    def closed(tokens: int, *output: int, is_open: bool = True, **params) -> bool:
        budget = ThinkingBudget(tokens=tokens, opening=(1, 2), closing=3, is_open=is_open)
        (token,) = draw(logits, [row(temperature=0, thinking_budget=budget, output=output, **params)])
        assert token in (3, 5)
        return token == 3

    assert closed(0)
    assert [closed(2, *[7] * count) for count in range(3)] == [False, False, True]
    assert not closed(2, 7, 7, 3)  # once
    assert not closed(2, 7, 3, 7, 7)  # the model closed it
    assert not closed(0, 7, 1, 7, is_open=False)  # it has not begun
    assert [closed(1, 1, 2, *[7] * count, is_open=False) for count in range(2)] == [False, True]
    assert closed(2, 7, 3, 1, 2, 7, 7)  # again
    assert closed(0, allowed_token_ids=(5,), bad_words=BadWords(((3,),)))


def test_logprobs_are_computed_from_raw_logits():
    rows = [row(temperature=0, logprobs=3), row(logprobs=0, logit_bias={4: 100.0}, temperature=0.1), row()]
    found = sampled(LOGITS.expand(3, -1), rows)
    expected = LOGITS.log_softmax(-1)
    best = expected.topk(3)
    assert found[0].logprob == pytest.approx(float(expected.max()))
    assert [token for token, _ in found[0].top] == best.indices.tolist()
    assert [value for _, value in found[0].top] == pytest.approx(best.values.tolist())
    assert (found[1].token, found[1].top) == (4, ())
    assert found[1].logprob == pytest.approx(float(expected[4]))
    assert (found[2].logprob, found[2].top) == (None, ())


def ranked(logits: torch.Tensor, count: int) -> list[int]:
    """Return the `count` most likely tokens, with ties in order of ids."""
    values = logits.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))[:count]


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_card])]
# Several groups of the search with a remainder, one group and less than one, with ties within and across groups.
TIED = [(5003, 0.3), (640, 0.01), (64, 0.1), (7, 0.1)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("vocab", "scale"), TIED, ids=str)
def test_alternatives_do_not_depend_on_other_rows(vocab, scale, device):
    counts = [1, 0, 3, 20, 5, 7, 2, 20, 9]
    logits = torch.randn(len(counts), vocab, generator=torch.Generator().manual_seed(8)) * scale
    logits = (3 + logits).bfloat16().float()  # few distinct values
    logits[5], logits[6] = 0.0, torch.tensor([0.0, -0.0]).repeat(vocab)[:vocab]
    logits[7, 5:] = -torch.inf
    rows = [row(temperature=0, logprobs=count) for count in counts]
    on_device = logits.to(device)
    together = sampled(on_device, rows)
    alone = [sampled(on_device[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    mixed = sampled(on_device.repeat(2, 1), rows + [row()] * len(rows))[: len(rows)]
    for batch in (together, alone, mixed):
        for given, count, found in zip(logits, counts, batch, strict=True):
            expected = ranked(given, count)
            assert [token for token, _ in found.top] == expected
            assert found.token == ranked(given, 1)[0]
            assert [value for _, value in found.top] == pytest.approx(given.log_softmax(-1)[expected].tolist())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("vocab", "scale"), TIED, ids=str)
def test_prompt_alternatives_do_not_depend_on_their_number(vocab, scale, device):
    logits = (3 + torch.randn(20, vocab, generator=torch.Generator().manual_seed(9)) * scale).bfloat16()
    targets = [i % vocab for i in range(20)]
    for count in (0, 1, 5, 20, 300):
        found = prompt_logprobs(logits.to(device), targets, count).read()
        for given, target, score in zip(logits, targets, found, strict=True):
            assert [token for token, _ in score.top] == ranked(given, count)
            assert score.rank == 1 + int((given > given[target]).sum())


def test_prompt_logprobs():
    logits = torch.randn(4, VOCAB)
    targets = [3, 999, int(logits[2].argmax()), 0]
    expected = logits.log_softmax(-1)
    for i, got in enumerate(prompt_logprobs(logits, targets, 2).read()):
        assert got.logprob == pytest.approx(float(expected[i, targets[i]]))
        assert got.rank == 1 + int((logits[i] > logits[i, targets[i]]).sum())
        assert [token for token, _ in got.top] == logits[i].topk(2).indices.tolist()
    assert prompt_logprobs(logits, targets, 0).read()[0].top == ()
    assert prompt_logprobs(logits[:0], [], 1).read() == []


def sorted_threshold(scaled: torch.Tensor, top_k: int, top_p: float) -> float:
    kept = scaled.sort(descending=True).values[:top_k]
    if top_p == 1:
        return float(kept[-1]) if top_k < len(scaled) else -math.inf
    sums = kept.double().exp().cumsum(0)
    return float(kept[int((sums >= top_p * sums[-1]).nonzero()[0])])


@pytest.mark.parametrize("kind", ["smooth", "flat", "equals", "forbidden"])
def test_thresholds_equal_those_of_the_sorted_row(kind):
    ks = [1, 40, 299, 5003, 5003, 5003, 700, 20]
    ps = [1.0, 0.95, 0.3, 0.9, 1.0, 0.999, 0.5, 1.0]
    scaled = torch.randn(len(ks), 5003, generator=torch.Generator().manual_seed(4)) * (0.1 if kind == "flat" else 3)
    if kind == "equals":
        scaled = scaled.round()
    if kind == "forbidden":
        scaled[:, 30:] = -torch.inf
    scaled -= scaled.amax(-1, keepdim=True)
    expected = [sorted_threshold(*of) for of in zip(scaled, ks, ps, strict=True)]
    for size in (1, len(ks)):  # top_k alone needs fewer candidates than with top_p
        parts = (scaled.split(size), torch.tensor(ks).split(size), torch.tensor(ps, dtype=torch.float64).split(size))
        found = [largest_first(*part)[:, 0] for part in zip(*parts, strict=True)]
        assert torch.cat(found).tolist() == pytest.approx(expected, abs=0)


def test_thresholds_do_not_depend_on_other_rows():
    scaled = torch.randn(4, 80_000, generator=torch.Generator().manual_seed(0)) * 3
    scaled -= scaled.amax(-1, keepdim=True)
    totals = torch.cat([row.double().exp_().sum(-1, keepdim=True) for row in scaled.split(1)])
    # Shares that some prefix reaches exactly or misses by the last bit of the sum.
    shares = scaled.sort(descending=True).values[:, :256:8].double().exp_().cumsum(-1) / totals
    before, no_limit = torch.get_num_threads(), torch.full((4,), 80_000)
    torch.set_num_threads(2)
    try:
        for top_p in shares.T:
            together = largest_first(scaled, no_limit, top_p)
            parts = zip(scaled.split(1), no_limit.split(1), top_p.split(1), strict=True)
            assert torch.equal(together, torch.cat([largest_first(*part) for part in parts]))
    finally:
        torch.set_num_threads(before)


def test_nan_logits_raise_no_error():
    logits = torch.zeros(3, 5003)
    logits[0], logits[1, ::2], logits[2, 7] = torch.nan, torch.nan, torch.nan
    rows = [row(top_k=40), row(top_p=0.5), row(top_k=3, top_p=0.9)]
    assert all(0 <= s.token < 5003 for s in sampled(logits, rows))


def test_equal_logits_are_kept_or_dropped_together():
    logits = torch.zeros(VOCAB)
    tokens = draw(logits, [row(seed=i, top_k=1) for i in range(50)])
    assert len(set(tokens)) > 10  # top_k=1 keeps all equal logits


def test_forbidden_tokens_are_never_sampled():
    logits = torch.full((300,), -torch.inf)
    logits[[0, 128, 299]] = 0.0
    tokens = draw(logits, [row(seed=i) for i in range(300)])
    assert set(tokens) == {0, 128, 299}


def test_logits_of_the_wrong_shape_are_rejected():
    with pytest.raises(ValueError, match="the rows need"):
        sampled(torch.zeros(2, VOCAB), [row()])


@pytest.mark.gpu
@needs_card
def test_cuda_samples_the_same_tokens():
    rows = [row(seed=i, **p) for i in range(50) for p in ({}, {"top_p": 0.8}, {"top_k": 9}, {"temperature": 0})]
    logits = torch.randn(len(rows), VOCAB)
    on_cpu = sampled(logits, rows)
    assert sampled(logits.cuda(), rows) == on_cpu
