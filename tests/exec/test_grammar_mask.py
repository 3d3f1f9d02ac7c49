from __future__ import annotations

import json
from typing import Any

import engines
import numpy as np
import pytest
import torch
from engines import GRAMMARS, VOCAB, Characters, engine, mixed_requests, run, tiny_model
from test_invisible_preemption import outputs

from skipjoin.core.events import Finished
from skipjoin.core.request import FinishReason, Request
from skipjoin.exec.sampling import Sampling
from skipjoin.model.grammar_mask import GrammarMask, GrammarState
from skipjoin.model.grammars import _MAX_COMPILED, Grammars
from skipjoin.model.sampler import Sampler, SampleRow
from skipjoin.policies.eviction import Recompute
from skipjoin.sampling import SamplingParams
from skipjoin.structured_output import GrammarError, StructuredOutput

EOS = VOCAB - 1
regex = lambda text, **more: StructuredOutput(kind="regex", text=text, **more)  # noqa: E731


def text_of(tokens: list[int]) -> str:
    return b"".join(Characters().token_bytes(token) for token in tokens if token != EOS).decode()


def generate(structured: StructuredOutput, max_tokens: int = 40, **params: Any) -> tuple[str, str]:
    """Sample an output from random logits; return its text and the reason why it ended."""
    asked = SamplingParams(max_tokens=max_tokens, structured_outputs=structured, seed=1, **params)
    sampler = Sampler(VOCAB, limit=GrammarMask(GRAMMARS))
    state, output = sampler.start(asked, 1, [1], (EOS,)), list[int]()
    draw = torch.Generator().manual_seed(5)
    while len(output) < max_tokens:
        logits = torch.randn(1, VOCAB, generator=draw) * 3
        logits[0, EOS] += 8
        (sampled,) = sampler.sample(logits, [SampleRow(state, len(output))]).report.read()
        assert not state.error
        output.append(sampled.token)
        if sampled.token == EOS or sampled.token in asked.stop_token_ids:
            return text_of(output), "stop"
        state.accept(output[-1:])
    return text_of(output), "length"


def test_outputs_follow_their_grammar_and_end_with_it() -> None:
    assert generate(regex("[0-9]{3}")) == (generate(regex("[0-9]{3}"))[0], "stop")
    assert generate(regex("[0-9]{3}"))[0].isdigit()
    chosen, reason = generate(StructuredOutput.choice(['a "quoted" text', "back\\slash", "x"]), temperature=1.5)
    assert (chosen in ['a "quoted" text', "back\\slash", "x"], reason) == (True, "stop")
    schema = {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 2, "maxItems": 4}
    values = json.loads(generate(StructuredOutput.json(schema))[0])
    assert 2 <= len(values) <= 4
    assert generate(StructuredOutput(kind="grammar", text='start: "a" B\nB: /[bc]{2}/'))[0][0] == "a"


@pytest.mark.parametrize("params", [{"min_tokens": 30}, {"ignore_eos": True}, {"logit_bias": {EOS: -100.0}}])
def test_outputs_end_where_the_grammar_must_end(params: dict[str, Any]) -> None:
    text, reason = generate(regex("[a-z]{2,5}"), **params)
    assert (reason, len(text)) == ("stop", 5)


def test_outputs_end_by_stop_tokens_where_the_grammar_may_end() -> None:
    stop = ord("z") - 0x20
    text, reason = generate(regex("[a-y]{4,20}"), stop_token_ids=(stop,), logit_bias={stop: 100.0, EOS: -100.0})
    assert (reason, len(text), text[-1]) == ("stop", 5, "z")


def test_length_limit_cuts_a_text() -> None:
    text, reason = generate(StructuredOutput.json({"type": "array", "items": {"type": "integer"}}), 5, min_tokens=5)
    assert (reason, text[0], len(text)) == ("length", "[", 5)


def test_constraints_begin_after_their_tokens() -> None:
    state = GrammarMask(GRAMMARS).start(SamplingParams(structured_outputs=regex("x", after=(7, 8))), [1], (EOS,))
    assert isinstance(state, GrammarState)
    for chunk in ([7], [7], [1, 8, 7]):
        state.accept(chunk)
        assert not state.is_active(0)
    state.accept([8, ord("x") - 0x20])
    assert state.is_active(0)
    assert state.matcher.is_accepting()


@pytest.mark.parametrize(
    "bad",
    [
        StructuredOutput.json({"not": {}}),
        StructuredOutput.json('{"type"'),
        StructuredOutput.json({"$ref": "http://example.com/schema.json"}),
        StructuredOutput.json({"type": "string", "pattern": "(?=a)b"}),
        regex("(?<!a)b"),
        StructuredOutput(kind="grammar", text="start: unknown"),
    ],
)
def test_grammars_that_cannot_be_enforced_are_refused(bad: StructuredOutput) -> None:
    with pytest.raises(GrammarError, match=r"^(cannot be enforced|must be a JSON schema): "):
        GRAMMARS.matcher(bad)


def test_constraints_are_bounded_unicode_text() -> None:
    with pytest.raises(GrammarError, match="at most 65536 bytes, got 65538"):
        regex("é" * 32769)
    with pytest.raises(GrammarError, match="half a surrogate pair"):
        StructuredOutput.choice(["\ud800"])


def test_masks_remove_the_same_tokens_from_any_rows() -> None:
    """Constrained rows between others, in a vocabulary that fills no whole word."""
    sampler = Sampler(VOCAB, limit=GrammarMask(GRAMMARS))
    digits = SamplingParams(temperature=0, structured_outputs=regex("[0-9]+"))
    rows = [sampler.start(SamplingParams(temperature=0) if i % 2 else digits, 1, [1], (EOS,)) for i in range(5)]
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(5, VOCAB)).astype(np.float32))
    sampled = sampler.sample(logits, [SampleRow(row, 0) for row in rows]).report.read()
    allowed = np.array([0x30 <= token + 0x20 <= 0x39 for token in range(VOCAB)])
    expected = [np.where(allowed | (i % 2 == 1), row, -np.inf).argmax() for i, row in enumerate(logits.numpy())]
    assert [sample.token for sample in sampled] == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_grammar_ends_its_request_alone(depth: int) -> None:
    run(*engine(tiny_model("llama"), Recompute(), device_blocks=60, slots=3, depth=depth), others := mixed_requests())
    expected = outputs(others)
    params = SamplingParams(
        max_tokens=20, temperature=0, structured_outputs=StructuredOutput.json({"not": {"const": 1}})
    )
    bad = Request(7, 0.0, [1, 2, 3], 20, sampling=Sampling(params, 1, (EOS,)))
    requests = mixed_requests()
    events = run(*engine(tiny_model("llama"), Recompute(), device_blocks=60, slots=3, depth=depth), [*requests, bad])
    assert outputs(requests) == expected
    (ended,) = [event for event in events if isinstance(event, Finished) and event.request is bad]
    assert (ended.reason, ended.is_refused) == (FinishReason.ERROR, False)
    assert ended.detail.startswith('structured_outputs cannot be enforced: the keyword "not"')


# Alternatives that need some of the parser's items each.
_RULES = "\n".join(f'r{i}: "x" w{i}\nw{i}: /[a-z]+/ "{i}"' for i in range(50))
WIDE = StructuredOutput(kind="grammar", text=f"start: {' | '.join(f'r{i}' for i in range(50))}\n{_RULES}")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_over_the_limit_of_a_mask_ends_its_request_alone(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "GRAMMARS", Grammars(Characters, VOCAB, [EOS], max_items=50))  # type: ignore[arg-type]
    run(*engine(tiny_model("llama"), Recompute(), device_blocks=60, slots=3, depth=depth), others := mixed_requests())
    params = SamplingParams(max_tokens=20, temperature=0, structured_outputs=WIDE)
    wide = Request(7, 0.0, [1, 2, 3], 20, stop_tokens=frozenset({EOS}), sampling=Sampling(params, 1, (EOS,)))
    requests = mixed_requests()
    events = run(*engine(tiny_model("llama"), Recompute(), device_blocks=60, slots=3, depth=depth), [*requests, wide])
    assert outputs(requests) == outputs(others)
    (ended,) = [event for event in events if isinstance(event, Finished) and event.request is wide]
    assert (ended.reason, ended.is_refused) == (FinishReason.ERROR, True)
    assert "is too expensive after 2 tokens: " in ended.detail
    assert "limit 50" in ended.detail
    assert ended.detail.endswith("simplify it, for example with fewer alternatives that match the same text")


def test_wide_grammars_are_within_the_limits() -> None:
    """A choice of 1,024 texts, 400 optional properties, and 300 alternatives."""
    wide = [
        StructuredOutput.choice([f"{number * 7919 % 10_007:05d}" for number in range(1024)]),
        StructuredOutput.json({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}),
        StructuredOutput.json({"enum": [*range(300), *map(str, range(300))]}),
        StructuredOutput.json({"anyOf": [{"type": "array", "items": {"const": f"v{i}"}} for i in range(300)]}),
    ]
    for structured in wide:
        text, _ = generate(structured, 12)
        assert text


def test_new_grammars_are_slow_until_they_prove_to_be_quick() -> None:
    """With each relapse they need longer."""
    params = SamplingParams(structured_outputs=regex("[0-9]+proven"))
    grammars = Grammars(Characters, VOCAB, [EOS])  # type: ignore[arg-type]

    def masks_until_quick() -> int:
        state = GrammarMask(grammars).start(params, [1], (EOS,))
        for number in range(1000):
            if not state.is_slow:
                state.note_mask(0.01)
                assert state.is_slow
                return number
            state.note_mask(0.001 if number < 2 else 0.0001)
        raise AssertionError

    assert [masks_until_quick() for _ in range(4)] == [4, 2 + 32, 2 + 64, 2 + 128]


def test_a_salt_with_many_grammars_evicts_its_own() -> None:
    grammars = Grammars(Characters, VOCAB, [EOS])  # type: ignore[arg-type]
    kept = grammars.get(regex("kept"), "b")
    for number in range(2 * _MAX_COMPILED):
        grammars.get(regex(f"[0-9]{number}"), "a")
    assert grammars.known(regex("kept"), "b") is kept
    assert len(grammars._compiled) == _MAX_COMPILED


def test_masks_of_a_request_have_a_limit_of_time() -> None:
    mask = GrammarMask(GRAMMARS, max_masks_s=0.0)
    state = mask.start(SamplingParams(structured_outputs=regex("[0-9]+")), [1], (EOS,))
    assert isinstance(state, GrammarState)
    (allowed,), _ = mask.masks([state])
    assert state.error.startswith(
        "the constraint on the output (response_format, structured_outputs, guided_* or tools)"
    )
    assert "took more than 0 s of processor time" in state.error
    assert state.is_over_limit
    assert state.is_active(0)  # ranks that are faster still compute the same mask
    assert np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")).tolist() == list(range(16, 26))
