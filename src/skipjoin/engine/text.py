from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from skipjoin.core.request import FinishReason
from skipjoin.engine.stops import Answer, StopStrings
from skipjoin.formats.calls import Part, PartKind
from skipjoin.formats.message import MessageReader
from skipjoin.model.tokenizer import Detokenizer, Tokenizer
from skipjoin.sampling import TokenDetail, TokenLogprob


class Output(NamedTuple):
    choice: int = 0
    token: int | None = None
    detail: TokenDetail | None = None
    reason: FinishReason | None = None
    error: str = ""
    is_refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How tokens become text. Stop strings count after `min_tokens`; `score_only` returns prompt logprobs alone."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    kept: frozenset[int] = frozenset()
    min_tokens: int = 0
    echo: bool = False
    score_only: bool = False
    scores: bool = False
    keeps_ids: bool = False


class Choice:
    """One sequence's output as it grows.

    Args:
        text: The prompt as the client spelled it, or None for token ids.
        reader: Reads the text as a message. Stop strings without special tokens then count in its content only.

    Attributes:
        tokens: Includes those of a stop string and the end-of-sequence token.
        offsets: For each generated token of `scored`, the index in the text at which it begins.
        prompt_scored: Prompt tokens with log-probabilities, if requested.
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        text: str | None,
        tokenizer: Tokenizer,
        rules: TextRules,
        *,
        reader: MessageReader | None = None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.tokens = 0
        self.scored: list[TokenLogprob] = []
        self.prompt_scored: tuple[TokenLogprob, ...] = ()
        self._ids: list[int] = []
        self.offsets: list[int] = []
        self.finish_reason: str | None = None
        self._rules = rules
        self._detokenizer = Detokenizer(tokenizer, prompt, rules.skip_special, rules.kept)
        include = rules.include_stop
        special = [stop for stop in rules.stop if tokenizer.has_special(stop)]
        anywhere, in_content = (rules.stop, []) if reader is None else (special, list(set(rules.stop) - set(special)))
        self._stops = StopStrings(anywhere, include=include, special=special) if anywhere else None
        self.answer = None
        if reader is not None:
            is_counted = reader.has_reasoning or rules.scores
            self.answer = Answer(reader, in_content, include=include, is_counted=is_counted)
        self._taken = 0  # scored tokens that were taken
        self.echoed = ""
        if rules.echo:
            self.echoed = text if text is not None else tokenizer.decode(prompt, rules.skip_special)
        self._lead = self.echoed
        self._text_length = len(self.echoed)  # of the text of all tokens, shown or not

    def take(self, output: Output) -> str:
        """Add an output and return the new text; none may follow once `finish_reason` is set."""
        shown, self._lead = self._lead, ""
        if output.detail is not None:
            self.prompt_scored = self.prompt_scored or output.detail.prompt
        if output.detail is not None and self._rules.scores:
            if self._rules.echo:
                self.scored.extend(output.detail.prompt)
            if not self._rules.score_only:
                self.scored.append(output.detail.chosen)
                self.offsets.append(self._text_length)
        if self._rules.score_only:
            self.finish_reason = FinishReason.LENGTH.value
            return shown
        text = hidden = ""
        if output.token is not None:
            self.tokens += 1
            if self._rules.keeps_ids:
                self._ids.append(output.token)
            # The final token, end-of-sequence or one of stop_token_ids, is shown only on request.
            if output.reason is not FinishReason.STOP or self._rules.include_stop:
                text = self._detokenizer.add(output.token)
                hidden = self._detokenizer.hidden(output.token)
        is_last = output.reason is not None
        if is_last:
            text += self._detokenizer.finish()
        self._text_length += len(text)
        shown += self._until_stop(text, hidden, is_last=is_last)
        if self._has_stopped:
            self.finish_reason = FinishReason.STOP.value
        elif output.reason is not None:
            self.finish_reason = output.reason.value
        return shown

    @property
    def values_to_format(self) -> int:
        return len(self.scored) + len(self.prompt_scored)

    @property
    def skips_special(self) -> bool:
        return self._rules.skip_special

    def take_scored(self) -> list[TokenLogprob]:
        scored, self.scored, self.offsets = self.scored, [], []
        self._taken += len(scored)
        return scored

    def take_ids(self) -> list[int]:
        ids, self._ids = self._ids, []
        return ids

    def take_scored_text(self) -> list[TokenLogprob]:
        """Return the scored tokens of the content since the last call, as far as their kinds are known."""
        if self.answer is None:
            return self.take_scored()
        kinds = self.answer.kinds[self._taken :]
        scored, self.scored = self.scored[: len(kinds)], self.scored[len(kinds) :]
        self._taken += len(scored)
        return [scores for scores, kind in zip(scored, kinds, strict=False) if kind is PartKind.TEXT]

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning without its marks; None if the model has no reasoning that is recognized."""
        if self.answer is None or not self.answer.has_reasoning:
            return None
        return self.answer.kinds.count(PartKind.REASONING)

    @property
    def stop_string(self) -> str | None:
        found = None if self._stops is None else self._stops.stop
        return found if found is not None or self.answer is None else self.answer.stop

    def take_parts(self, text: str) -> list[Part]:
        if self.answer is not None:
            return self.answer.take_parts()
        return [Part(text)] if text else []

    @property
    def has_calls(self) -> bool:
        return self.answer is not None and self.answer.has_calls

    @property
    def _has_stopped(self) -> bool:
        is_found = self._stops is not None and self._stops.found
        return is_found or (self.answer is not None and self.answer.found)

    def _until_stop(self, text: str, hidden: str, *, is_last: bool) -> str:
        is_early = self.tokens <= self._rules.min_tokens
        if self._stops is not None:
            text = self._stops.add(text, hidden=hidden, is_early=is_early)
            if is_last and not self._stops.found:
                text += self._stops.flush()
            is_last = is_last or self._stops.found
        if self.answer is None:
            return text
        return self.answer.add(text, is_early=is_early, is_last=is_last)
