"""Logits processor of constrained output: removes the tokens that the grammar does not allow next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher

from skipjoin.model.grammars import Grammars
from skipjoin.model.logits_processors import ProcessorState
from skipjoin.model.ops.threads import threads_here
from skipjoin.model.ops.token_mask import remove_tokens
from skipjoin.model.transfer import send
from skipjoin.sampling import SamplingParams
from skipjoin.structured_output import GrammarError


class GrammarMask:
    """Allows the tokens that keep the output a prefix of some text of the grammar.

    Where no other token is allowed, the output ends, whatever `min_tokens`, `ignore_eos` and other processors say.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._words = -(-grammars.vocab_size // 32)

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

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, GrammarState]]) -> None:
        masks = np.zeros((len(rows), self._words), np.int32)
        # In parallel, without the GIL.
        _executor(threads_here()).unsafe_compute_mask_ptr(
            [(state.matcher, place) for place, (_, state) in enumerate(rows)],
            masks.ctypes.data,
            masks.itemsize * self._words,
            len(rows),
        )
        ending = [(row, state.eos) for mask, (row, state) in zip(masks, rows, strict=True) if state.settle(mask)]
        remove_tokens(logits, [row for row, _ in rows], masks)
        # Whatever other processors have done to end-of-sequence.
        if pairs := [(row, token) for row, tokens in ending for token in tokens]:
            logits[tuple(send(pairs, logits.device).T)] = 0.0


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
        self.eos = tuple(eos_token_ids)
        self._eos = _Bits(eos_token_ids)
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

    def settle(self, mask: np.ndarray) -> bool:
        """Apply the rules of ending to the allowed tokens, int32 [words]; return whether the output must end here."""
        if self.matcher.is_error():
            self._note_error()
        params = self._params
        if params.stop_token_ids and self.matcher.is_accepting():
            self._ending.add_to(mask)
        if params.ignore_eos or self._length < params.min_tokens:
            others = mask.copy()
            self._ending.remove_from(others)
            if others.any():
                if params.ignore_eos:
                    self._eos.remove_from(mask)
                return False
        elif mask.any():
            return False
        self._eos.add_to(mask)
        return True

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
        ids = np.array(sorted(set(tokens)), np.int64)
        self._words, self._bits = ids >> 5, (np.uint32(1) << (ids & 31).astype(np.uint32)).view(np.int32)

    def add_to(self, mask: np.ndarray) -> None:
        np.bitwise_or.at(mask, self._words, self._bits)

    def remove_from(self, mask: np.ndarray) -> None:
        np.bitwise_and.at(mask, self._words, ~self._bits)


@cache
def _executor(threads: int) -> LLExecutor:
    """Return threads that compute masks."""
    return LLExecutor(threads)
