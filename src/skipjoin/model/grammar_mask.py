"""Limit of constrained output: the tokens that the grammar allows next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher

from skipjoin.model.grammars import Grammars
from skipjoin.model.logits_processors import ProcessorState
from skipjoin.model.ops.threads import threads_here
from skipjoin.sampling import SamplingParams
from skipjoin.structured_output import GrammarError

# Number of threads up to which one of them computes all masks: waking the others takes longer than they save.
_MAX_ALONE = 2


class GrammarMask:
    """Allows the tokens that keep the output a prefix of some text of the grammar.

    Where no other token is allowed, the output ends, whatever `min_tokens`, `ignore_eos` and logits processors say.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._words = -(-grammars.vocab_size // 32)
        self._masks = np.empty((0, self._words), np.int32)  # reused, because new memory takes time

    def start(
        self, params: SamplingParams, prompt: Sequence[int], eos_token_ids: Collection[int]
    ) -> GrammarState | None:
        if params.structured_outputs is None:
            return None
        try:
            matcher = self._grammars.matcher(params.structured_outputs)
        except GrammarError as error:
            return GrammarState(None, params, eos_token_ids, f"structured_outputs {error}")
        return GrammarState(matcher, params, eos_token_ids)

    def masks(self, states: Sequence[GrammarState]) -> tuple[np.ndarray, np.ndarray]:
        if len(self._masks) < len(states):
            self._masks = np.empty((len(states), self._words), np.int32)
        masks = self._masks[: len(states)]
        _compute(states, masks)
        for state, mask in zip(states, masks, strict=True):
            state.settle(mask)
        must_end = masks.view(np.uint32).max(axis=1) == 0
        for place in np.flatnonzero(must_end).tolist():
            states[place].eos.add_to(masks[place])
        return masks, must_end


def _compute(states: Sequence[GrammarState], masks: np.ndarray) -> None:
    """Compute the tokens that each grammar allows, without the GIL."""
    first, size, threads = masks.ctypes.data, masks.strides[0], threads_here()
    if threads > _MAX_ALONE:
        each = [(state.matcher, place) for place, state in enumerate(states)]
        _executor(threads).unsafe_compute_mask_ptr(each, first, size, len(states))
        return
    for place, state in enumerate(states):
        state.matcher.unsafe_compute_mask_ptr(first + place * size, size)


class GrammarState(ProcessorState):
    """Position of one request in its grammar.

    Attributes:
        eos: End-of-sequence tokens.
    """

    reads_output = True

    def __init__(
        self, matcher: LLMatcher | None, params: SamplingParams, eos_token_ids: Collection[int], error: str = ""
    ) -> None:
        assert params.structured_outputs is not None
        self.error = error
        self._matcher = matcher
        self._params = params
        self.eos = _Bits(eos_token_ids)
        self._ending = _Bits([*eos_token_ids, *params.stop_token_ids])
        self._after = params.structured_outputs.after
        self._recent: list[int] = []  # last tokens before the constraint begins
        self._has_begun = not self._after
        self._length = 0

    @property
    def matcher(self) -> LLMatcher:
        assert self._matcher is not None
        return self._matcher

    def is_active(self, length: int) -> bool:
        return self._has_begun and not self.error

    def accept(self, tokens: Sequence[int]) -> None:
        self._length += len(tokens)
        if not self._has_begun:
            tokens = self._after_beginning(tokens)
        if tokens and not self.error and not self.matcher.consume_tokens(list(tokens)):
            self._note_error()

    def settle(self, mask: np.ndarray) -> None:
        """Apply the rules of ending to the allowed tokens, int32 [words], of which none may remain."""
        if self.matcher.is_error():
            self._note_error()
        params = self._params
        if params.stop_token_ids and self.matcher.is_accepting():
            self._ending.add_to(mask)
        if self._length < params.min_tokens:
            self._ending.remove_from(mask)
        elif params.ignore_eos:
            self.eos.remove_from(mask)

    def _after_beginning(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens after the first occurrence of `after`."""
        for at, token in enumerate(tokens, 1):
            self._recent = [*self._recent, token][-len(self._after) :]
            if tuple(self._recent) == self._after:
                self._has_begun = True
                return tokens[at:]
        return ()

    def _note_error(self) -> None:
        self.error = f"structured_outputs cannot be enforced further: {self.matcher.get_error()}"


class _Bits:
    """Set of few tokens, as bits of a packed mask."""

    def __init__(self, tokens: Collection[int]) -> None:
        bits: dict[int, int] = {}
        for token in tokens:
            bits[token >> 5] = bits.get(token >> 5, 0) | 1 << (token & 31)
        self._words = np.array(list(bits), np.int64)
        self._bits = np.array(list(bits.values()), np.uint32).view(np.int32)

    def add_to(self, mask: np.ndarray) -> None:
        mask[self._words] |= self._bits

    def remove_from(self, mask: np.ndarray) -> None:
        mask[self._words] &= ~self._bits


@cache
def _executor(threads: int) -> LLExecutor:
    """Return threads that compute masks."""
    return LLExecutor(threads)
