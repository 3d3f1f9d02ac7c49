"""Detokenization of output: incremental text, stop strings and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from skipjoin.core.request import FinishReason
from skipjoin.model.tokenizer import Detokenizer, Tokenizer
from skipjoin.sampling import TokenDetail, TokenLogprob


class Output(NamedTuple):
    """Increment of one sequence."""

    choice: int = 0
    token: int | None = None
    detail: TokenDetail | None = None
    reason: FinishReason | None = None
    error: str = ""


class StopStrings:
    """Finds the first stop string in a text, and holds back text that may begin one."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Add text and return what may be shown now; empty once a stop string was `found`."""
        if self.found:
            return ""
        text = self._held + text
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            # The stop string that completes first counts, wherever tokens cut the text.
            end, at = min(hits)
            self.found, self._held = True, ""
            return text[:end] if self._include else text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    first = stop[0]
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(first, start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How a request's tokens become text.

    Attributes:
        min_tokens: Number of tokens after which stop strings count.
        kept: Special tokens that are part of the text nevertheless.
        score_only: Return prompt logprobs and no tokens.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    kept: frozenset[int] = frozenset()
    min_tokens: int = 0
    echo: bool = False
    score_only: bool = False
    scores: bool = False


class Choice:
    """One sequence's output as it grows.

    Attributes:
        tokens: Number of generated tokens, including those of a stop string and the end-of-sequence token.
        finish_reason: "stop" or "length", or "error" after an output with an error.
        echoed: The prompt as the text begins with it; empty without `TextRules.echo`.
        scored: Log-probabilities that were not taken yet.
        offsets: For each generated token of `scored`, the index in the text at which it begins.
    """

    __slots__ = (
        "_detokenizer",
        "_lead",
        "_rules",
        "_stops",
        "_text_length",
        "echoed",
        "finish_reason",
        "index",
        "offsets",
        "prompt",
        "scored",
        "tokens",
    )

    def __init__(self, index: int, prompt: list[int], text: str | None, tokenizer: Tokenizer, rules: TextRules) -> None:
        """Create the choice; `text` is the prompt as the client spelled it, or None for token ids."""
        self.index = index
        self.prompt = prompt
        self.tokens = 0
        self.scored: list[TokenLogprob] = []
        self.offsets: list[int] = []
        self.finish_reason: str | None = None
        self._rules = rules
        self._detokenizer = Detokenizer(tokenizer, prompt, rules.skip_special, rules.kept)
        self._stops = StopStrings(rules.stop, include=rules.include_stop) if rules.stop else None
        self.echoed = ""
        if rules.echo:
            self.echoed = text if text is not None else tokenizer.decode(prompt, rules.skip_special)
        self._lead = self.echoed
        self._text_length = len(self.echoed)  # of the text of all tokens, shown or not

    def take(self, output: Output) -> str:
        """Add an output and return the new text; none may follow once `finish_reason` is set."""
        shown, self._lead = self._lead, ""
        if output.detail is not None and self._rules.scores:
            self.scored.extend(output.detail.prompt)
            if not self._rules.score_only:
                self.scored.append(output.detail.chosen)
                self.offsets.append(self._text_length)
        if self._rules.score_only:
            self.finish_reason = FinishReason.LENGTH.value
            return shown
        text = ""
        if output.token is not None:
            self.tokens += 1
            # The final token, end-of-sequence or one of stop_token_ids, is shown only on request.
            if output.reason is not FinishReason.STOP or self._rules.include_stop:
                text = self._detokenizer.add(output.token)
        if output.reason is not None:
            text += self._detokenizer.finish()
        self._text_length += len(text)
        shown += self._until_stop(text)
        if self._stops is not None and self._stops.found:
            self.finish_reason = FinishReason.STOP.value
        elif output.reason is not None:
            self.finish_reason = output.reason.value
            shown += self._stops.flush() if self._stops is not None else ""
        return shown

    @property
    def skips_special(self) -> bool:
        return self._rules.skip_special

    def take_scored(self) -> list[TokenLogprob]:
        scored, self.scored, self.offsets = self.scored, [], []
        return scored

    def _until_stop(self, text: str) -> str:
        if self._stops is None or not text or self.tokens <= self._rules.min_tokens:
            return text
        return self._stops.add(text)
