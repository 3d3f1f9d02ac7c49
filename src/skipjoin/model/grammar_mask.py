from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher

from skipjoin.model.grammars import CompiledGrammar, Grammars
from skipjoin.model.logits_processors import ProcessorState
from skipjoin.model.ops.threads import threads_here
from skipjoin.sampling import SamplingParams
from skipjoin.structured_output import GrammarError

# Number of threads up to which one of them computes all masks: waking the others takes longer than they save.
_MAX_ALONE = 2
# Seconds that a step spends on masks: some, some for each mask, and a share of the rest of the step. Most masks take
# 0.1 ms. Requests whose masks take more are slow: their next masks are computed outside of the steps.
_STEP_S, _STEP_MASK_S, _STEP_SHARE = 0.001, 0.00015, 0.25
# Time between steps beyond which the engine was idle.
_MAX_STEP_S = 0.1
# A mask that takes longer than `_SLOW_S` makes a request slow, whatever the step. `_QUICK_MASKS` consecutive ones that
# take less than `_QUICK_S` end that. With each relapse, which costs a step up to 10 ms a request, a grammar needs
# twice as many. A new grammar is slow until `_FIRST_MASKS` of its masks have not been slow.
_SLOW_S, _QUICK_S, _QUICK_MASKS, _FIRST_MASKS = 0.003, 0.00025, 16, 4
# Seconds that all masks of a request may take: some, and some for each token. On a machine eight times slower than
# ours, those of all 400 public schemas take less, with 0.8 ms on average at most.
MAX_MASKS_S, MAX_MASKS_TOKEN_S = 10.0, 0.01
# In the errors of exceeded limits, which have no kind of their own.
_OVER_LIMIT = re.compile("too many|too big|max is", re.IGNORECASE)
_SUBJECT = "the constraint on the output (response_format, structured_outputs, guided_* or tools)"
_REMEDY = "simplify it, for example with fewer alternatives that match the same text"


class GrammarMask:
    """Allows the tokens that keep the output a prefix of some text of the grammar.

    Where no token is allowed, the output ends, whatever `min_tokens`, `ignore_eos` and logits processors say.
    """

    def __init__(self, grammars: Grammars, *, max_masks_s: float = MAX_MASKS_S) -> None:
        self.grammars = grammars
        self._max_masks_s = max_masks_s
        self._words = -(-grammars.vocab_size // 32)
        self._masks = np.empty((0, self._words), np.int32)  # reused, because new memory takes time
        self._ended = 0.0  # when the latest masks of a step were computed

    def start(
        self, params: SamplingParams, prompt: Sequence[int], eos_token_ids: Collection[int], salt: str = ""
    ) -> GrammarState | None:
        if params.structured_outputs is None:
            return None
        try:
            compiled = self.grammars.get(params.structured_outputs, salt)
        except GrammarError as error:
            return GrammarState(None, params, eos_token_ids, f"structured_outputs {error}")
        return GrammarState(compiled, params, eos_token_ids, max_masks_s=self._max_masks_s)

    def masks(self, states: Sequence[GrammarState]) -> tuple[np.ndarray, np.ndarray]:
        """Return the allowed tokens of active states, and whether each output must end here.

        Masks are packed bits, int32 [len(states), words], with at least one token each. The next call may overwrite
        them.
        """
        if len(self._masks) < len(states):
            self._masks = np.empty((len(states), self._words), np.int32)
        masks = self._masks[: len(states)]
        for place, state in enumerate(states):
            if state.mask is not None:
                masks[place] = state.mask
        rest_s = min(time.perf_counter() - self._ended, _MAX_STEP_S)
        _compute([(place, state) for place, state in enumerate(states) if state.mask is None], masks, rest_s)
        self._ended = time.perf_counter()
        for state, mask in zip(states, masks, strict=True):
            state.settle(mask)
        must_end = masks.view(np.uint32).max(axis=1) == 0
        for place in np.flatnonzero(must_end).tolist():
            states[place].eos.add_to(masks[place])
        return masks, must_end

    def compute_ahead(self, state: GrammarState, output: Sequence[int]) -> None:
        """Advance a state to the end of an output, and compute its mask; no step may use the state meanwhile."""
        state.advance(output)
        if state.mask is None and state.is_active(len(output)):
            mask = np.empty(self._words, np.int32)
            begin = time.thread_time()
            state.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            state.note_mask(time.thread_time() - begin)
            state.mask = mask


def _compute(states: Sequence[tuple[int, GrammarState]], masks: np.ndarray, rest_s: float) -> None:
    if not states:
        return
    first, size, threads = masks.ctypes.data, masks.strides[0], threads_here()
    if threads > _MAX_ALONE:
        begin = time.perf_counter()
        each = [(state.matcher, place) for place, state in states]
        _executor(threads).unsafe_compute_mask_ptr(each, first, size, len(masks))
        seconds = time.perf_counter() - begin
        costs = [seconds / len(states)] * len(states)
    else:
        costs, begin = [], time.thread_time()
        for place, state in states:
            state.matcher.unsafe_compute_mask_ptr(first + place * size, size)
            costs.append(-begin + (begin := time.thread_time()))
        seconds = sum(costs)
    limit = _STEP_S + len(states) * _STEP_MASK_S + rest_s * _STEP_SHARE
    for cost, (_, state) in sorted(zip(costs, states, strict=True), key=lambda item: -item[0]):
        # Threads that share the masks of a step do not say whose took long.
        state.note_mask(cost, is_slow=seconds > limit)
        if threads <= _MAX_ALONE:
            seconds -= cost


class GrammarState(ProcessorState):
    """Position of one request in its grammar.

    Attributes:
        mask: Tokens allowed next, if `GrammarMask.compute_ahead` has computed them.
        is_slow: Whether the latest masks took long, so that the next one should be computed ahead.
        uncharged_s: Seconds of its masks and grammar that are not charged yet.
    """

    reads_output = True

    def __init__(
        self,
        compiled: CompiledGrammar | None,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        error: str = "",
        *,
        max_masks_s: float = MAX_MASKS_S,
    ) -> None:
        assert params.structured_outputs is not None
        self.error = error
        self._compiled = compiled
        self._matcher = None if compiled is None else compiled.matcher.deep_copy()
        self._params = params
        self._max_masks_s = max_masks_s
        self.eos = _Bits(eos_token_ids)
        self._ending = _Bits([*eos_token_ids, *params.stop_token_ids])
        self._after = params.structured_outputs.after
        self._recent: list[int] = []  # last tokens before the constraint begins
        self._has_begun = not self._after
        self._has_failed = compiled is None
        self._length = 0
        self._ahead = 0  # tokens that `accept` has not received yet
        self.mask: np.ndarray | None = None
        self.is_slow = compiled is not None and compiled.is_slow
        self.seconds = self.uncharged_s = 0.0

    @property
    def matcher(self) -> LLMatcher:
        assert self._matcher is not None
        return self._matcher

    def is_active(self, length: int) -> bool:
        return self._has_begun and not self._has_failed

    def accept(self, tokens: Sequence[int]) -> None:
        known = min(self._ahead, len(tokens))
        self._ahead -= known
        self._consume(tokens[known:])

    def advance(self, output: Sequence[int]) -> None:
        """Accept the new tokens of an output; a later `accept` of them has no effect."""
        new = output[self._length :]
        self._ahead += len(new)
        self._consume(new)

    def _consume(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self._length += len(tokens)
        self.mask = None
        if not self._has_begun:
            tokens = self._after_beginning(tokens)
        if tokens and not self._has_failed and not self.matcher.consume_tokens(list(tokens)):
            self._note_error()

    def note_mask(self, seconds: float, *, is_slow: bool = False) -> None:
        self.seconds += seconds
        self.uncharged_s += seconds
        limit = self._max_masks_s + self._length * MAX_MASKS_TOKEN_S
        if self.seconds > limit and not self.error:
            # The mask stays in use, because other ranks may not reach the limit.
            self._exceed(f"the masks of allowed tokens took more than {limit:g} s of processor time")
        assert self._compiled is not None
        self._compiled.is_slow = self.is_slow = self._is_slow(self._compiled, seconds, is_slow=is_slow)

    def _is_slow(self, grammar: CompiledGrammar, seconds: float, *, is_slow: bool) -> bool:
        if is_slow or seconds > _SLOW_S:
            grammar.relapses += not self.is_slow
            grammar.was_slow, grammar.quick = True, 0
            return True
        if not self.is_slow:
            return False
        is_quick = seconds <= _QUICK_S or not grammar.was_slow
        grammar.quick = grammar.quick + 1 if is_quick else 0
        return grammar.quick < (_QUICK_MASKS << grammar.relapses if grammar.was_slow else _FIRST_MASKS)

    def settle(self, mask: np.ndarray) -> None:
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
        for at, token in enumerate(tokens, 1):
            self._recent = [*self._recent, token][-len(self._after) :]
            if tuple(self._recent) == self._after:
                self._has_begun = True
                return tokens[at:]
        return ()

    def _note_error(self) -> None:
        self._has_failed = True
        why = " ".join(self.matcher.get_error().removesuffix("<non-verbose/>").split())
        if _OVER_LIMIT.search(why):
            self._exceed(why)
        else:
            self.error = f"structured_outputs cannot be enforced further: {why}"

    def _exceed(self, limit: str) -> None:
        self.is_over_limit = True
        self.error = too_expensive(self._length, limit)


def too_expensive(tokens: int, limit: str) -> str:
    return f"{_SUBJECT} is too expensive after {tokens} tokens: {limit}: {_REMEDY}"


class _Bits:
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
    return LLExecutor(threads)
