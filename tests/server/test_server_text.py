from __future__ import annotations

from pathlib import Path

import pytest
import tiny_model as tiny
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing

from skipjoin.core.request import FinishReason
from skipjoin.engine.stops import Answer, StopStrings
from skipjoin.engine.text import Choice, Output, TextRules
from skipjoin.formats.calls import joined
from skipjoin.formats.message import MessageReader
from skipjoin.formats.table import HERMES
from skipjoin.model.errors import ModelError
from skipjoin.model.tokenizer import load_tokenizer
from skipjoin.sampling import TokenDetail, TokenLogprob
from skipjoin.server.api.completions import completion_logprobs, prompt_offsets
from skipjoin.server.api.responses import CompletionLogprobs


def first_complete(text: str, stops: list[str]) -> tuple[int, int] | None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (min(ends)[1], min(ends)[0]) if ends else None


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.booleans(),
)
def test_text_ends_at_the_first_stop_string(parts: list[str], stops: list[str], include: bool) -> None:
    text = "".join(parts)
    hit = first_complete(text, stops)
    strings = StopStrings(stops, include=include)
    shown = "".join([strings.add(part) for part in parts])
    assert strings.found == (hit is not None)
    shown += strings.flush()
    assert shown == (text if hit is None else text[: hit[1] if include else hit[0]])


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.text("ab", min_size=1, max_size=5))
def test_only_a_possible_stop_prefix_is_held_back(parts: list[str], stop: str) -> None:
    strings = StopStrings([stop], include=False)
    text = shown = ""
    for part in parts:
        text += part
        shown += strings.add(part)
        if strings.found:
            return
        held = text[len(shown) :]
        longest = max(size for size in range(len(stop)) if text.endswith(stop[:size]))
        assert len(held) == longest


@given(
    st.lists(st.tuples(st.text("ab", max_size=2), st.sampled_from(["", "", "<E>", "<F>"])), max_size=10),
    st.lists(st.sampled_from(["a", "ab", "ba", "<E>", "a<E>", "<E>b", "<E><F>", "b<E>a"]), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_stop_strings_with_special_tokens_are_found_in_the_text_that_hides_them(
    pieces: list[tuple[str, str]], stops: list[str], early: int
) -> None:
    strings = StopStrings(stops, include=False, special=[stop for stop in stops if "<" in stop])
    spelled = visible = shown = ""
    for number, (text, hidden) in enumerate(pieces):
        before = len(spelled), len(visible)
        spelled, visible = spelled + hidden + text, visible + text
        shown += strings.add(text, hidden=hidden, is_early=number < early)
        # A stop string that ends in this piece, found in either spelling.
        hits = [
            (stop, at)
            for stop in stops
            for whole, start in ((spelled, before[0]), (visible, before[1]))
            if (at := whole.find(stop, max(0, start - len(stop) + 1))) >= 0
        ]
        assert strings.found == (bool(hits) and number >= early)
        if strings.found:
            break
    assert visible.startswith(shown)
    if not strings.found:
        assert shown + strings.flush() == visible


@given(st.integers(0, 12), st.booleans())
def test_a_stop_string_that_ends_after_min_tokens_counts_wherever_it_begins(least: int, include: bool) -> None:
    strings, text = StopStrings(["STOP"], include=include), "abSTOPcdSTOPx"
    shown = "".join(strings.add(char, is_early=number < least) for number, char in enumerate(text))
    ends = [end for end in (6, 12) if end > least]
    assert shown + strings.flush() == (text[: ends[0] - (0 if include else 4)] if ends else text)


def thinking(*stops: str, include: bool = False) -> Answer:
    reader = MessageReader(HERMES, reads_calls=True, is_thinking=False)
    return Answer(reader, stops, include=include)


TALK = '<think>a STOP b</think>c <tool_call>{"name": "f", "arguments": {"x": "STOP"}}</tool_call> d STOP e'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_count_in_the_content_only(size: int, include: bool) -> None:
    answer, raw, parts = thinking("STOP", include=include), "", []
    for at in range(0, len(TALK), size):
        raw += answer.add(TALK[at : at + size], is_early=False, is_last=at + size >= len(TALK))
        parts += answer.take_parts()
        if answer.found:
            break
    content, reasoning, calls = joined(parts)
    assert answer.found
    assert answer.has_calls
    assert (reasoning, calls[0].arguments) == ("a STOP b", '{"x": "STOP"}')
    assert content == ("c d STOP" if include else "c d ")
    assert TALK.startswith(raw)


def test_held_content_is_kept_before_a_call_and_at_the_end() -> None:
    answer = thinking("xyz")
    answer.add('xy<tool_call>{"name": "f", "arguments": {}}</tool_call>x', is_early=False, is_last=True)
    content, _, calls = joined(answer.take_parts())
    assert (content, len(calls), answer.found) == ("xyx", 1, False)


def make_choice(folder: Path, rules: TextRules, text: str = "x") -> Choice:
    tokenizer = load_tokenizer(folder)
    return Choice(0, tokenizer.encode(text), None, tokenizer, rules)


@pytest.mark.parametrize("text", ["plain", "ünïcödé €", "👩‍👩‍👧 family", "mixed 😀 and a"])
def test_streamed_parts_join_to_the_text(tokenizer_folder: Path, text: str) -> None:
    choice = make_choice(tokenizer_folder, TextRules())
    ids = load_tokenizer(tokenizer_folder).encode(text)
    parts = [choice.take(Output(0, token, None, None)) for token in ids[:-1]]
    parts.append(choice.take(Output(0, ids[-1], None, FinishReason.LENGTH)))
    assert "".join(parts) == text
    assert choice.finish_reason == "length"
    assert choice.tokens == len(ids)


@pytest.mark.parametrize(
    ("stop", "text", "taken", "reason"),
    [
        ((), "€", ["", "\ufffd"], "length"),
        (("b",), "ab", ["a", ""], "stop"),
        (("abc",), "ab", ["", "ab"], "length"),
    ],
    ids=["incomplete character", "stop string in the last token", "held text"],
)
def test_last_output_completes_the_text(
    tokenizer_folder: Path, stop: tuple[str, ...], text: str, taken: list[str], reason: str
) -> None:
    choice = make_choice(tokenizer_folder, TextRules(stop=stop))
    first, *rest = load_tokenizer(tokenizer_folder).encode(text)
    last = None if text == "€" else rest[0]
    assert [choice.take(Output(0, first)), choice.take(Output(0, last, None, FinishReason.LENGTH))] == taken
    assert choice.finish_reason == reason


def test_special_tokens_are_skipped_by_default(tokenizer_folder: Path) -> None:
    for skip, shown in ((True, ""), (False, "<eos>")):
        choice = make_choice(tokenizer_folder, TextRules(skip_special=skip))
        assert choice.take(Output(0, tiny.EOS, None, FinishReason.LENGTH)) == shown


def test_template_file_overrides_the_models_template(tokenizer_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    tokenizer = load_tokenizer(tokenizer_folder, chat_template=file)
    ids = tokenizer.chat([{"role": "user", "content": "ab"}])
    assert tokenizer.decode(ids) == "<ab>"
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tokenizer_folder, chat_template=tmp_path / "none")


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("prompt", ["a<eos>b€", "", "ünï <|user|>x"])
def test_offsets_of_tokens_are_places_in_the_text(tokenizer_folder: Path, prompt: str, echo: bool, skip: bool) -> None:
    """The tokenizer adds a special token that no text shows."""
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.backend.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", tiny.EOS)])
    for as_ids in (False, True):
        ids = tokenizer.encode(prompt)
        text = tokenizer.decode(ids, skip) if as_ids else prompt
        rules = TextRules(echo=echo, scores=True, skip_special=skip, stop=("!!",))
        choice = Choice(0, ids, text, tokenizer, rules)
        shown, found = "", CompletionLogprobs()
        written = tokenizer.encode("x€<|user|>y! z", add_special_tokens=False)
        for number, token in enumerate(written):
            before = tuple(TokenLogprob(token, -1.0) for token in ids) if echo and not number else ()
            reason = FinishReason.LENGTH if number == len(written) - 1 else None
            shown += choice.take(Output(0, token, TokenDetail(TokenLogprob(token, -1.0), before), reason))
            part = completion_logprobs(tokenizer, choice)
            found.tokens += part.tokens
            found.text_offset += part.text_offset
        assert len(found.text_offset) == len(found.tokens) == len(written) + (len(ids) if echo else 0)
        assert found.text_offset == sorted(found.text_offset)
        for token, offset in zip(found.tokens, found.text_offset, strict=True):
            if len(token) == 1 or (token.startswith("<") and not skip and offset):
                assert shown[offset:].startswith(token)
            elif token.startswith("bytes:"):
                assert shown[offset] in "€ünï"


def test_offsets_of_text_that_the_tokenizer_changes(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.backend.normalizer = normalizers.Lowercase()
    ids = tokenizer.encode("AB c")
    assert prompt_offsets(tokenizer, ids, "AB c", skip_special=True) == [0, 1, 2, 3]
    assert prompt_offsets(tokenizer, ids, "other", skip_special=True) == [0, 1, 2, 3]
