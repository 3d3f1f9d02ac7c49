from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from skipjoin.model.transfer import to_device
from skipjoin.sampling import SamplingParams, ThinkingBudget

# Logit of a banned token. A grammar that allows no other one still gets it.
_BANNED = -1e30


class Asked(NamedTuple):
    params: SamplingParams
    prompt: Sequence[int]
    eos_token_ids: Collection[int]


class ProcessorState:
    """State of one request in one processor.

    Attributes:
        reads_output: Whether the output tokens are passed to `accept`.
        error: Why the request cannot continue; empty if it can.
        is_over_limit: Whether the error is a limit that the request exceeds.
    """

    reads_output: ClassVar[bool] = False
    error: str = ""
    is_over_limit: bool = False

    def accept(self, tokens: Sequence[int]) -> None: ...

    def is_active(self, length: int) -> bool:
        return True


class LogitsProcessor(Protocol):
    def start(self, asked: Asked) -> ProcessorState | None: ...

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, Any]]) -> None:
        """Adjust logits, float32 [n, vocab], in place; `rows` ascend, and have active states."""
        ...


def default_processors(vocab_size: int) -> tuple[LogitsProcessor, ...]:
    return (
        *(LogitBias(vocab_size), RepetitionPenalty(), OutputPenalties(), MinTokens(vocab_size)),
        *(AllowedTokens(), BannedWords(vocab_size), ClosedThinking(vocab_size)),
    )


class _OfVocabulary:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size


class _TokensState(ProcessorState):
    def __init__(self, tokens: Collection[int], values: Collection[float] = ()) -> None:
        self.tokens = np.fromiter(tokens, np.int64)
        self.values = np.fromiter(values, np.float32)


class LogitBias(_OfVocabulary):
    def start(self, asked: Asked) -> _TokensState | None:
        known = {token: bias for token, bias in asked.params.logit_bias.items() if token < self._vocab_size}
        return _TokensState(known, known.values()) if known else None

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, _TokensState]]) -> None:
        bias = np.concatenate([state.values for _, state in rows])
        _flat(logits)[_index(logits, rows)] += _send(bias, logits)


class RepetitionPenalty:
    """Divides positive and multiplies negative logits of tokens in prompt or output."""

    def start(self, asked: Asked) -> _SeenState | None:
        return None if asked.params.repetition_penalty == 1 else _SeenState(asked.params, asked.prompt)

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, _SeenState]]) -> None:
        flat, index = _flat(logits), _index(logits, rows)
        values, factor = flat[index], _send(_each(rows, "repetition_penalty"), logits)
        flat[index] = torch.where(values > 0, values / factor, values * factor)


class OutputPenalties:
    """Subtracts `frequency_penalty` per occurrence of a token in the output, and `presence_penalty` once."""

    def start(self, asked: Asked) -> _SeenState | None:
        params = asked.params
        return _SeenState(params) if params.frequency_penalty or params.presence_penalty else None

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, _SeenState]]) -> None:
        frequency = _each(rows, "frequency_penalty") * np.concatenate([state.counts for _, state in rows])
        presence = _each(rows, "presence_penalty")
        flat, index = _flat(logits), _index(logits, rows)
        flat[index] = flat[index] - _send(frequency, logits) - _send(presence, logits)


class MinTokens(_OfVocabulary):
    def start(self, asked: Asked) -> _MinTokensState | None:
        params = asked.params
        ending = {*params.stop_token_ids, *(() if params.ignore_eos else asked.eos_token_ids)}
        known = [token for token in ending if token < self._vocab_size]
        return _MinTokensState(params.min_tokens, known) if params.min_tokens and known else None

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, _MinTokensState]]) -> None:
        _flat(logits)[_index(logits, rows)] = -torch.inf


class _MinTokensState(_TokensState):
    def __init__(self, min_tokens: int, ending: Collection[int]) -> None:
        super().__init__(ending)
        self._min_tokens = min_tokens

    def is_active(self, length: int) -> bool:
        return length < self._min_tokens


class AllowedTokens:
    def start(self, asked: Asked) -> _TokensState | None:
        return _TokensState(sorted(set(tokens))) if (tokens := asked.params.allowed_token_ids) else None

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, _TokensState]]) -> None:
        index = _index(logits, rows)
        kept = _flat(logits)[index]
        _ban(logits, rows)
        _flat(logits)[index] = kept


class BannedWords(_OfVocabulary):
    """Bans the last tokens of words whose first tokens end the output."""

    def start(self, asked: Asked) -> _WordsState | None:
        words = asked.params.bad_words
        if words is None:
            return None
        known = [word for word in words.sequences if word and max(word) < self._vocab_size]
        return _WordsState(known) if known else None

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, _WordsState]]) -> None:
        _flat(logits)[_index(logits, rows)] = _BANNED


class _WordsState(ProcessorState):
    reads_output = True

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._words = words
        self._longest = max(map(len, words)) - 1
        self._tail: tuple[int, ...] = ()
        self.accept(())

    def accept(self, tokens: Sequence[int]) -> None:
        tail = (*self._tail, *tokens)
        self._tail = tail[max(0, len(tail) - self._longest) :]
        found = {word[-1] for word in self._words if _ends(self._tail, word[:-1])}
        self.tokens = np.array(sorted(found), np.int64)

    def is_active(self, length: int) -> bool:
        return len(self.tokens) > 0


class ClosedThinking(_OfVocabulary):
    """Lets the closing token follow once the reasoning has its number of tokens."""

    def start(self, asked: Asked) -> _ThinkingState | None:
        budget = asked.params.thinking_budget
        return _ThinkingState(budget) if budget is not None and budget.closing < self._vocab_size else None

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, _ThinkingState]]) -> None:
        _ban(logits, rows)
        _flat(logits)[_index(logits, rows)] = 0.0


class _ThinkingState(_TokensState):
    reads_output = True

    def __init__(self, budget: ThinkingBudget) -> None:
        super().__init__([budget.closing])
        self.closing = budget.closing
        self._opening, self._left, self._budget = budget.opening, budget.tokens, budget.tokens
        self._is_open = budget.is_open
        self._tail: tuple[int, ...] = ()

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._is_open:
                self._is_open, self._left = token != self.closing, self._left - 1
                continue
            self._tail = (*self._tail, token)[-len(self._opening) :]
            if self._tail == self._opening:
                self._is_open, self._left = True, self._budget

    def is_active(self, length: int) -> bool:
        return self._is_open and self._left <= 0


def _ends(tail: tuple[int, ...], words: tuple[int, ...]) -> bool:
    return not words or tail[-len(words) :] == words


class _SeenState(ProcessorState):
    reads_output = True

    def __init__(self, params: SamplingParams, first: Sequence[int] = ()) -> None:
        self.params = params
        self._places: dict[int, int] = {}
        self._tokens = np.empty(16, np.int64)
        self._counts = np.zeros(16, np.float32)
        self.accept(first)

    @property
    def tokens(self) -> np.ndarray:
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._places)]

    def accept(self, tokens: Sequence[int]) -> None:
        for token, count in Counter(tokens).items() if len(tokens) > 1 else ((token, 1) for token in tokens):
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._tokens[place] = token
            self._counts[place] += count

    def is_active(self, length: int) -> bool:
        return len(self._places) > 0


def _flat(logits: torch.Tensor) -> torch.Tensor:
    return logits.view(-1)


def _index(logits: torch.Tensor, rows: Sequence[tuple[int, Any]]) -> torch.Tensor:
    return _send(np.concatenate([state.tokens + row * logits.shape[1] for row, state in rows]), logits)


def _each(rows: Sequence[tuple[int, _SeenState]], parameter: str) -> np.ndarray:
    values = np.array([getattr(state.params, parameter) for _, state in rows], np.float32)
    return np.repeat(values, [len(state.tokens) for _, state in rows])


def _ban(logits: torch.Tensor, rows: Sequence[tuple[int, Any]]) -> None:
    logits[to_device(torch.tensor([row for row, _ in rows]), logits.device)] = _BANNED


def _send(values: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return to_device(torch.from_numpy(values), logits.device)
