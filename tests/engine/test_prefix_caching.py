from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from skipjoin import LLM, SamplingParams
from skipjoin.sampling import ParameterError

BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
Pair = tuple[LLM, LLM]


@pytest.fixture(scope="module", params=[("auto", 0.01), ("torch", 0)], ids=["auto, cpu tier", "torch"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Return an LLM with prefix caching and one without, with pools for little more than one request."""
    attention, swap_gib = request.param
    settings = dict(
        progress=False, threads=1, profile="off", attention=attention, kv_cache_gib=0.0045, swap_space_gib=swap_gib
    )
    with ExitStack() as stack:
        caching, plain = (
            stack.enter_context(LLM(**settings, max_num_batched_tokens=128, enable_prefix_caching=on))
            for on in (True, False)
        )
        assert 64 <= caching.engine.info.device_blocks < 80
        yield caching, plain


def prompt_of(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(tokens)]


def full_blocks(prompt: list[int]) -> int:
    return (len(prompt) - 1) // BLOCK * BLOCK


def test_cached_prefixes_do_not_change_tokens(pair: Pair) -> None:
    caching, plain = pair
    turn, filler = prompt_of(1, 300), prompt_of(2, 1000)
    (filled,) = plain.generate(filler, GREEDY)
    for params in (GREEDY, SEEDED):
        first, again = (caching.generate(turn, params)[0] for _ in range(2))
        (expected,) = plain.generate(turn, params)
        assert first.token_ids == again.token_ids == expected.token_ids
        assert (again.cached_tokens, expected.cached_tokens) == (full_blocks(turn), 0)
        assert caching.generate(filler, GREEDY)[0].token_ids == filled.token_ids
        batch = [turn[: 100 * index] + prompt_of(index, 40) for index in (1, 2)]
        found, wanted = caching.generate(batch, params), plain.generate(batch, params)
        assert [output.token_ids for output in found] == [output.token_ids for output in wanted]
        turn = turn + first.token_ids + prompt_of(3, 30)


def test_next_turn_hits_the_cached_output_and_another_prefix_misses(pair: Pair) -> None:
    caching, _ = pair
    prompt = prompt_of(10, 500)
    (first,) = caching.generate(prompt, GREEDY)
    assert first.cached_tokens == 0
    # The last token of an output is not computed.
    turn = prompt + first.token_ids + [5]
    assert caching.generate(turn, GREEDY)[0].cached_tokens == (len(turn) - 2) // BLOCK * BLOCK
    assert caching.generate([*prompt[:470], 1], GREEDY)[0].cached_tokens == 464
    assert caching.generate([prompt[0] + 1, *prompt[1:]], GREEDY)[0].cached_tokens == 0


def test_computed_blocks_of_an_aborted_prompt_are_cached(pair: Pair) -> None:
    caching, plain = pair
    prompt, loop = prompt_of(20, 600), caching._loop
    for chunks in (1, 3):
        prompt = [chunks, *prompt]
        loop.add(1_000_000 + chunks, prompt, GREEDY)
        request = loop.core.requests[1_000_000 + chunks]
        while request.progress.computed < 128 * chunks:  # the first step may be an earlier plan without requests
            loop.step()
        computed = request.progress.computed
        loop.abort(1_000_000 + chunks)
        (found,) = caching.generate(prompt, GREEDY)
        assert found.cached_tokens == computed // 16 * 16
        assert found.token_ids == plain.generate(prompt, GREEDY)[0].token_ids


def test_prompt_logprobs_bypass_the_cache(pair: Pair) -> None:
    caching, plain = pair
    prompt = prompt_of(30, 100)
    caching.generate(prompt, GREEDY)
    assert caching.generate(prompt, GREEDY)[0].cached_tokens == 96
    scored = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2)
    (found,), (expected,) = caching.generate(prompt, scored), plain.generate(prompt, scored)
    assert found.cached_tokens == 0
    assert found.details == expected.details
    assert len(found.details[0].prompt) == len(prompt)


@pytest.mark.parametrize(
    ("salt", "text"),
    [
        ("", "must have 1 to 256 characters, got 0"),
        ("x" * 257, "must have 1 to 256 characters, got 257"),
        (["a", ""], "must have 1 to 256 characters, got 0"),
        (["a"], r"must be one, or one per prompt \(2\), got 1"),
        (["a", 5], "must be a text or None, got int 5"),
        (b"ab", "must be a text, or one of them or None per prompt, got bytes b'ab'"),
        ("\ud800", "must be Unicode text, and half a surrogate pair is none"),
    ],
)
def test_invalid_salt_is_refused(pair: Pair, salt: Any, text: str) -> None:
    with pytest.raises(ParameterError, match=f"cache_salt {text}") as raised:
        pair[1].generate([[5, 6], [7]], GREEDY, cache_salt=salt)
    assert raised.value.param == "cache_salt"
