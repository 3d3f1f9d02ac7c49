from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from skipjoin.formats.grammar import CallSchema, Marks, after_reasoning, calls_grammar
from skipjoin.formats.message import is_thinking
from skipjoin.formats.table import OutputFormat
from skipjoin.structured_output import StructuredOutput


class Vocabulary(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def ids_of(self, texts: Sequence[str]) -> frozenset[int]: ...


class Constraints:
    """Writes constraints for the output that follows a prompt. Methods raise `GrammarError`."""

    def __init__(self, output_format: OutputFormat, vocabulary: Vocabulary, prompt: str) -> None:
        think = output_format.think
        if think is not None and prompt.rstrip().endswith(think.close):  # the prompt has an empty reasoning
            output_format = replace(output_format, think=None)
        self._format, self._vocabulary = output_format, vocabulary
        self._is_thinking = is_thinking(output_format, prompt)
        self._marks = Marks(output_format, lambda mark: next(iter(vocabulary.ids_of([mark])), None))

    def calls(
        self,
        functions: Sequence[CallSchema],
        *,
        is_parallel: bool,
        must_call: bool,
        answer: StructuredOutput | None = None,
    ) -> StructuredOutput:
        return calls_grammar(
            self._format,
            self._marks,
            functions,
            is_parallel=is_parallel,
            is_thinking=self._is_thinking,
            answer=answer,
            must_call=must_call,
        )

    def after_reasoning(self, structured: StructuredOutput) -> StructuredOutput:
        think = self._format.think
        if think is None and not self._format.answer:
            return structured
        if structured.kind == "grammar":  # which has rules of its own
            closing = self._vocabulary.encode(think.close, add_special_tokens=False) if think is not None else []
            return replace(structured, after=tuple(closing)) if self._is_thinking else structured
        return after_reasoning(self._format, self._marks, structured, is_thinking=self._is_thinking)
