from __future__ import annotations

import json
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.tokenizer import Tokenizer, load_tokenizer
from skipjoin.schemas.look_ahead import check_escapes
from skipjoin.schemas.notation import Notation
from skipjoin.schemas.reasons import reason
from skipjoin.schemas.rules import json_rules, schema_of
from skipjoin.structured_output import GrammarError, StructuredOutput

logger = logging.getLogger(__name__)

# Compiled grammars to keep, besides those of unfinished requests. Each takes from 10 KB to a few MB.
_MAX_COMPILED = 64
# Items of the parser in one mask, which bounds its time to some 10 ms. Most of 400 public and 300 random schemas take
# 60 at most, and none over 600. An object of 480 optional properties takes 2,000, the bound of a parser's row.
MAX_MASK_ITEMS = 5_000
# Marks special tokens in the vocabulary, which no text can produce.
_SPECIAL = b"\xff"


@dataclass(eq=False, slots=True)
class CompiledGrammar:
    """Compiled grammar of any number of requests.

    Attributes:
        matcher: Copied by each request, and never advanced.
        is_slow: Whether the next masks should be computed outside of the steps, as those of a new grammar are.
    """

    matcher: LLMatcher
    is_slow: bool = True
    quick: int = 0
    relapses: int = 0
    was_slow: bool = False


class Grammars:
    """Compiles grammars for a model's vocabulary, and keeps the recent ones. Thread-safe.

    A matcher is a pure function of a grammar and output tokens, so it is never saved. Salts separate the users of
    grammars, because the time to the first token reveals whether one is compiled.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        max_items: int = MAX_MASK_ITEMS,
    ) -> None:
        self.vocab_size = vocab_size
        self._load_tokenizer = load_tokenizer
        self.eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, StructuredOutput], CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        # Errors must not quote the grammar, which would end up in logs.
        self._limits = LLParserLimits(verbose_errors=False, step_max_items=max_items)

    def matcher(self, structured: StructuredOutput, salt: str = "") -> LLMatcher:
        return self.get(structured, salt).matcher.deep_copy()

    def get(self, structured: StructuredOutput, salt: str = "") -> CompiledGrammar:
        if (known := self.known(structured, salt)) is not None:
            return known
        # Compiling releases the GIL, and must not block other grammars.
        compiled = CompiledGrammar(self.compiled(structured))
        with self._lock:
            self._compiled[salt, structured] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._evict()
        return compiled

    def known(self, structured: StructuredOutput, salt: str = "") -> CompiledGrammar | None:
        with self._lock:
            if (compiled := self._compiled.get((salt, structured))) is not None:
                self._compiled.move_to_end((salt, structured))
            return compiled

    def _evict(self) -> None:
        ((most, _),) = Counter(salt for salt, _ in self._compiled).most_common(1)
        del self._compiled[next(key for key in self._compiled if key[0] == most)]

    def compiled(self, structured: StructuredOutput) -> LLMatcher:
        vocabulary, grammar = self.vocabulary, llguidance_grammar(structured)
        compiled = LLMatcher(vocabulary, grammar.text, limits=self._limits, log_level=0)
        if compiled.is_error():
            raise GrammarError(reason(compiled.get_error(), grammar.impossible))
        return compiled

    def load(self) -> None:
        try:
            _ = self.vocabulary
        except GrammarError as error:
            logger.info("outputs cannot be constrained: %s", error)

    @property
    def vocabulary(self) -> LLTokenizer:
        """The model's vocabulary as a tree of bytes, which takes about a second for 128,000 tokens."""
        with self._loading:
            if self._vocabulary is None:
                if not self.eos_token_ids:
                    raise GrammarError("needs a model with an end-of-sequence token, and this one has none")
                try:
                    self._vocabulary = _vocabulary(self._load_tokenizer(), self.vocab_size, self.eos_token_ids)
                except (ModelError, ValueError) as error:
                    raise GrammarError(f"cannot be used with this model's tokenizer: {error}") from error
            return self._vocabulary


def grammars_of(folder: str | Path, config: ModelConfig) -> Grammars:
    return Grammars(partial(load_tokenizer, folder), config.vocab_size, config.eos_token_ids)


class _Wrapped:
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_ids
        self.eos_token_id = eos_token_id
        self.special_token_ids = sorted(token for token in special if token < vocab_size)
        self.tokens = [
            (_SPECIAL if token in special else b"") + tokenizer.token_bytes(token) for token in range(vocab_size)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, eos: list[int]) -> LLTokenizer:
    wrapped = TokenizerWrapper(_Wrapped(tokenizer, vocab_size, eos[0]))
    return LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=eos)


class Grammar(NamedTuple):
    text: str
    impossible: list[str]


def llguidance_grammar(structured: StructuredOutput) -> Grammar:
    text = structured.text
    if structured.kind == "regex":
        check_escapes(text)
        return Grammar(LLMatcher.grammar_from_regex(text), [])
    if structured.kind == "grammar":
        return Grammar(LLMatcher.grammar_from_lark(text), [])
    if structured.kind == "choice":
        # Quoted strings are written as in JSON.
        choices = " | ".join(json.dumps(load, ensure_ascii=False) for load in json.loads(text))
        return Grammar(LLMatcher.grammar_from_lark(f"start: {choices}"), [])
    rules = json_rules(schema_of(text), Notation(whitespace=structured.whitespace))
    if not rules.lines:
        return Grammar(LLMatcher.grammar_from_json_schema(rules.expression.removeprefix("%json ")), rules.impossible)
    lines = "\n".join([f"start: {rules.expression}", *rules.lines])
    return Grammar(LLMatcher.grammar_from_lark(lines), rules.impossible)
