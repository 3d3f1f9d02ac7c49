from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.progress import Progress, TaskID

from skipjoin.chat import Message, finish_reason_of, message_of
from skipjoin.core.events import Admitted
from skipjoin.core.request import NO_TARGET, FinishReason, RequestOptions, ServiceClass, Target
from skipjoin.formats.message import MessageReader
from skipjoin.llm_arguments import (
    Adapted,
    Salts,
    ToolChoice,
    adapters_of,
    conversations_of,
    options_of,
    params_per_prompt,
    prompts_of,
    salts_of,
    tool_use_of,
)
from skipjoin.local_engine import Generation, LocalEngine, Running, outputs_of
from skipjoin.model.tokenizer import TooManyTokensError
from skipjoin.pooling import Pooling, Task, cosine
from skipjoin.recipes import located_errors
from skipjoin.sampling import ContextLengthError, ParameterError, SamplingParams, pooled
from skipjoin.structured_output import GrammarError, StructuredOutput

Constraint = StructuredOutput | Mapping[str, Any] | None


class LLM(LocalEngine):
    """Model that is ready to generate. Use it as a context manager, or call `close`; arguments as `LocalEngine`.

    Example:
        >>> with LLM("tally", profile="off") as llm:
        ...     chat = [{"role": "user", "content": "Count from 3 to 6"}]
        ...     llm.chat(chat, SamplingParams(temperature=0, max_tokens=30))[0].text
        '3, 4, 5, 6'
    """

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        service: str = ServiceClass.REAL_TIME,
        priority: int = 0,
        target: Target = NO_TARGET,
        cache_salt: Salts = None,
        adapter: Adapted = None,
        structured_outputs: Constraint = None,
    ) -> list[Generation]:
        """Complete one or many prompts, each a text or its token ids, and return results in the same order.

        Args:
            params: One for all prompts, or one per prompt; None means `default_params`.
            service: "best-effort" prompts use spare capacity only, and accept no TTFT or TPOT objective.
            priority: Lower values run earlier.
            target: Soft objectives of each prompt, in seconds above 0.
            cache_salt: One for all prompts, or one per prompt, of 1 to 256 characters. Prompts share cached KV only
                with prompts of the same salt.
            adapter: Name of an adapter of the setting `lora_modules`, one for all prompts or one per prompt.
            structured_outputs: Constraint of all outputs, for example `{"json": schema}`, which replaces that of
                `params`. See `StructuredOutput.of`.

        Raises:
            ParameterError: If a prompt or an argument is invalid. Nothing runs in that case.
            RuntimeError: After `close`.
        """
        given = prompts_of(prompts)
        ids = [self.tokenizer.encode(item) if isinstance(item, str) else item for item in given]
        texts = [item if isinstance(item, str) else None for item in given]
        each = self._each(params, len(ids), structured_outputs)
        self._compile(each)
        options = self._options(options_of(service, priority, target), cache_salt, adapter, len(ids))
        found = self._run(ids, texts, each, options)
        return [item.generation for item in found]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        service: str = ServiceClass.REAL_TIME,
        priority: int = 0,
        target: Target = NO_TARGET,
        cache_salt: Salts = None,
        adapter: Adapted = None,
        structured_outputs: Constraint = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = None,
        parallel_tool_calls: bool | None = None,
    ) -> list[Generation]:
        """Answer one or many conversations with the model's chat template.

        A conversation is a list of messages with a role and a content. Other arguments are those of `generate`.

        Args:
            tools: Functions that the model may call, in OpenAI's form. Calls are in `Generation.message`.
            tool_choice: "auto", "none", "required", or functions by name, as in OpenAI's API.
            parallel_tool_calls: Whether a message may have several calls. None: unless `tool_choice` is one function.
        """
        use = tool_use_of(tools, tool_choice, is_parallel=parallel_tool_calls)
        chats = conversations_of(messages)
        given = self._each(params, len(chats), structured_outputs)
        prepared = [self._chat_prompt(chat, use, item) for chat, item in zip(chats, given, strict=True)]
        prompts, each = [ids for ids, _ in prepared], [constrained for _, constrained in prepared]
        self._compile(each)
        found = self._run(
            prompts,
            [None] * len(prompts),
            each,
            self._options(options_of(service, priority, target), cache_salt, adapter, len(prompts)),
            kept=self._conversations.kept(use),
            readers=[self._conversations.reader(prompt, use) for prompt in prompts],
        )
        for item in found:
            generation = item.generation
            message = generation.message = message_of(item.choice.take_parts(generation.text))
            generation.finish_reason = finish_reason_of(generation.finish_reason, has_calls="tool_calls" in message)
        return [item.generation for item in found]

    def embed(
        self,
        texts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        service: str = ServiceClass.REAL_TIME,
        priority: int = 0,
        target: Target = NO_TARGET,
        cache_salt: Salts = None,
    ) -> np.ndarray:
        """Return float32 [texts, dimensions], the embeddings of one or many texts, each as text or token ids.

        Args:
            dimensions: Number of leading values, of which vectors are normalized; None for all.
            service: As for `generate`, like the other arguments.

        Raises:
            ParameterError: If a text or an argument is invalid, or the model embeds no texts.
            RuntimeError: After `close`, or if the engine dropped a text.
        """
        self.engine.info.check_task((Task.EMBED,))
        given = prompts_of(texts)
        ids = self.tokenizer.encode_given(given)
        poolings = [Pooling(dimensions=dimensions)] * len(ids)
        return np.stack(self._pooled(ids, poolings, options_of(service, priority, target), cache_salt))

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        service: str = ServiceClass.REAL_TIME,
        priority: int = 0,
        target: Target = NO_TARGET,
        cache_salt: str | None = None,
    ) -> list[float]:
        """Return how well each document fits a query: a model's score of the pair, or the cosine of embeddings.

        Arguments and errors are those of `embed`.
        """
        self.engine.info.check_task((Task.EMBED, Task.SCORE))
        options = options_of(service, priority, target)
        if self.engine.info.task is Task.EMBED:
            first, *others = self.embed(
                [query, *documents], service=service, priority=priority, target=target, cache_salt=cache_salt
            )
            return [cosine(first, other) for other in others]
        asks = self.engine.info.asks_pairs
        most = self.engine.info.max_model_len
        try:
            pairs = [self.tokenizer.encode_pair(query, document, most, asks=asks) for document in documents]
        except TooManyTokensError as error:
            raise ContextLengthError.of_input("documents", most, error.found) from None
        poolings = [Pooling(second=second) for _, second in pairs]
        return [float(values[0]) for values in self._pooled([ids for ids, _ in pairs], poolings, options, cache_salt)]

    def _pooled(
        self, ids: list[list[int]], poolings: Sequence[Pooling], options: RequestOptions, cache_salt: Salts
    ) -> list[np.ndarray]:
        each = self._each([pooled(pooling) for pooling in poolings], len(ids), None)
        asked = self._options(options, cache_salt, None, len(ids))
        found = [item.generation for item in self._run(ids, [None] * len(ids), each, asked)]
        failed = (generation for generation in found if generation.finish_reason == FinishReason.ERROR)
        if (why := next((generation.error for generation in failed), None)) is not None:
            raise RuntimeError(why)
        return [np.frombuffer(generation.details[0].vector, "<f4") for generation in found]

    @located_errors()
    def _run(
        self,
        ids: list[list[int]],
        texts: Sequence[str | None],
        each: Sequence[SamplingParams],
        options: Sequence[RequestOptions],
        *,
        kept: frozenset[int] = frozenset(),
        readers: Sequence[MessageReader | None] = (),
    ) -> list[Running]:
        running: dict[int, Running] = {}
        try:
            each_reader = readers or [None] * len(ids)
            for prompt, text, given, asked, reader in zip(ids, texts, each, options, each_reader, strict=True):
                running[self._next_id] = self._start(
                    self._next_id, prompt, text, given, asked, kept=kept, reader=reader
                )
                self._next_id += 1
            results = list(running.values())
            # A stop string finishes a request between two steps, so the next step must not be submitted yet.
            ahead = not any(params.stop for params in each)
            with self._progress() as bars:
                self._drain(running, bars, bars.add_task("generating", total=len(ids)), ahead=ahead)
        finally:
            # After a refused prompt or an interrupt, the other requests must not keep running.
            for request_id, unfinished in running.items():
                self._loop.abort(request_id)
                self._learn(unfinished, FinishReason.ABORT)
        return results

    def _options(
        self, options: RequestOptions, cache_salt: Salts, adapter: Adapted, count: int
    ) -> list[RequestOptions]:
        pairs = zip(salts_of(cache_salt, count), adapters_of(adapter, self._adapters, count), strict=True)
        return [replace(options, cache_salt=salt, adapter=number) for salt, number in pairs]

    def _each(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int, constraint: Constraint
    ) -> list[SamplingParams]:
        if self._is_closed:
            raise RuntimeError("this LLM is closed: make another one to generate")
        each = params_per_prompt(self.default_params if given is None else given, count)
        try:
            if constraint is not None:
                output = constraint if isinstance(constraint, StructuredOutput) else StructuredOutput.of(constraint)
                each = [replace(params, structured_outputs=output) for params in each]
        except GrammarError as error:
            raise ParameterError("structured_outputs", f"structured_outputs {error}") from None
        return list(each)

    def _drain(self, running: dict[int, Running], bars: Progress, task: TaskID, *, ahead: bool) -> None:
        """Run until all requests have finished; `ahead` submits the next step before detokenizing."""
        while running:
            events = self._loop.step()
            if ahead:
                self._loop.submit()
            for event in events:
                if isinstance(event, Admitted) and event.request.id in running:
                    running[event.request.id].generation.admitted(event)
            for request_id, output in outputs_of(events).items():
                if request_id not in running:
                    continue
                sequence = running[request_id]
                sequence.generation.add(output, sequence.choice.take(output))
                if sequence.choice.finish_reason is not None:
                    sequence.generation.finish_reason = sequence.choice.finish_reason
                    # The engine does not know stop strings and would continue to generate.
                    self._loop.abort(request_id, FinishReason.STOP)
                    self._learn(sequence, output.reason or FinishReason.STOP)
                    del running[request_id]
                    bars.advance(task)
