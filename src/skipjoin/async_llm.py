from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from skipjoin.chat import Message, ToolUse, delta_of, finish_reason_of, message_of
from skipjoin.core.engine import RequestTooLargeError
from skipjoin.core.events import Admitted, Event
from skipjoin.core.request import NO_TARGET, FinishReason, RequestOptions, ServiceClass, Target
from skipjoin.engine.text import Output
from skipjoin.formats.calls import Part
from skipjoin.formats.message import MessageReader
from skipjoin.llm_arguments import (
    ToolChoice,
    adapter_of,
    conversations_of,
    options_of,
    prompts_of,
    salt_of,
    tool_use_of,
)
from skipjoin.local_engine import Generation, LocalEngine, Running, outputs_of
from skipjoin.pooling import Pooling, Task
from skipjoin.sampling import ParameterError, SamplingParams, pooled

# Pause of a thread whose requests cannot run yet, such as during a copy of KV.
_PAUSE_S = 0.001
MAX_N = 128
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text of one choice of a prompt.

    Attributes:
        finish_reason: As of `Generation`, in the choice's last chunk; before that None.
        delta: What the chunk adds to the message of a conversation, in OpenAI's form.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    delta: dict[str, Any] | None = None


class _Prompt(NamedTuple):
    text: str | None
    ids: list[int]
    params: SamplingParams
    is_conversation: bool = False
    readers: Sequence[MessageReader | None] = ()
    kept: frozenset[int] = frozenset()


@dataclass(eq=False, slots=True)
class _Stream:
    loop: asyncio.AbstractEventLoop
    ids: list[int]
    answers: Mapping[int, list[Part]]
    mailbox: asyncio.Queue[tuple[int, Output] | Exception] = field(default_factory=asyncio.Queue)
    running: dict[int, Running] = field(default_factory=dict)
    unfinished: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.unfinished = set(self.ids)

    def put(self, item: tuple[int, Output] | Exception) -> None:
        with suppress(RuntimeError):  # the event loop was closed without closing the stream
            self.loop.call_soon_threadsafe(self.mailbox.put_nowait, item)


class AsyncLLM(LocalEngine):
    """Model for many asyncio tasks, whose requests the scheduler runs together.

    Use it as an asynchronous context manager, or call `close`. Arguments are those of `LocalEngine`.

    Example:
        >>> async def count(to: int) -> list[str]:
        ...     async with AsyncLLM("tally", profile="off") as llm:
        ...         chat = [{"role": "user", "content": f"Count from 3 to {to}"}]
        ...         return [chunk.text async for chunk in llm.stream(chat, SamplingParams(temperature=0))]
        >>> "".join(asyncio.run(count(6)))
        '3, 4, 5, 6'
    """

    def __init__(self, model: str = "tally", *, progress: bool | None = False, **settings: Any) -> None:
        super().__init__(model, progress=progress, **settings)
        self._ids = itertools.count()
        self._streams: dict[int, _Stream] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._is_stuck = False  # the last step had no events
        self._thread = threading.Thread(target=self._serve, name="skipjoin-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Fail unfinished requests, stop the engine and save what was learned. Idempotent."""
        if not self._is_closed:
            self._inbox.put(None)
            self._thread.join()
        super().close()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        service: str = ServiceClass.REAL_TIME,
        priority: int = 0,
        target: Target = NO_TARGET,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = None,
        parallel_tool_calls: bool | None = None,
    ) -> AsyncIterator[Chunk]:
        """Generate `n` choices of one prompt and yield their text as it is generated.

        A stream that is closed early, such as by the cancellation of its task, aborts its choices.

        Args:
            prompt: Text, token ids, or a conversation: a list of messages with a role and a content.
            n: Number of choices, in [1, 128]. With a seed, each has a seed of its own.
            service: As for `LLM.generate`, like the other arguments.
            tools: For conversations, as for `LLM.chat`, like the other arguments of calls.

        Raises:
            ParameterError: If the prompt or an argument is invalid.
            RuntimeError: After `close`, or if the engine has failed.
        """
        number = adapter_of(adapter, self._adapters)
        options = replace(options_of(service, priority, target), cache_salt=salt_of(cache_salt), adapter=number)
        use = tool_use_of(tools, tool_choice, is_parallel=parallel_tool_calls)
        async with self._opened(prompt, params, n, options, use) as stream:
            while stream.unfinished:
                yield await self._next(stream)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        service: str = ServiceClass.REAL_TIME,
        priority: int = 0,
        target: Target = NO_TARGET,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = None,
        parallel_tool_calls: bool | None = None,
    ) -> list[Generation]:
        """Return `n` complete choices of one prompt; arguments and errors are those of `stream`."""
        number = adapter_of(adapter, self._adapters)
        options = replace(options_of(service, priority, target), cache_salt=salt_of(cache_salt), adapter=number)
        use = tool_use_of(tools, tool_choice, is_parallel=parallel_tool_calls)
        async with self._opened(prompt, params, n, options, use) as stream:
            while stream.unfinished:
                await self._next(stream)
            return [stream.running[number].generation for number in stream.ids]

    async def embed(
        self,
        texts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        service: str = ServiceClass.REAL_TIME,
        priority: int = 0,
        target: Target = NO_TARGET,
        cache_salt: str | None = None,
    ) -> np.ndarray:
        """Return float32 [texts, dimensions], as `LLM.embed` does, whose arguments and errors these are."""
        self.engine.info.check_task((Task.EMBED,))
        options = replace(options_of(service, priority, target), cache_salt=salt_of(cache_salt))
        params = pooled(Pooling(dimensions=dimensions))
        async with AsyncExitStack() as stack:
            opened = [
                self._opened(ids, params, 1, options, ToolUse())
                for ids in self.tokenizer.encode_given(prompts_of(texts))
            ]
            streams = [await stack.enter_async_context(stream) for stream in opened]
            return np.stack([await self._vector(stream) for stream in streams])

    async def _vector(self, stream: _Stream) -> np.ndarray:
        while stream.unfinished:
            await self._next(stream)
        (number,) = stream.ids
        generation = stream.running[number].generation
        if generation.finish_reason == FinishReason.ERROR:
            raise RuntimeError(generation.error)
        return np.frombuffer(generation.details[0].vector, "<f4")

    @asynccontextmanager
    async def _opened(
        self, prompt: Prompt, params: SamplingParams | None, n: int, options: RequestOptions, use: ToolUse
    ) -> AsyncIterator[_Stream]:
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_N:
            raise ParameterError("n", f"n must be an integer in [1, {MAX_N}], got {n!r}")
        given = self.default_params if params is None else params
        made = await asyncio.to_thread(self._prepared, prompt, given, n, use)
        ids = [next(self._ids) for _ in range(n)]
        answers = {number: list[Part]() for number in ids} if made.is_conversation else {}
        stream = _Stream(asyncio.get_running_loop(), ids, answers)
        for copy, number in enumerate(ids):
            seeded, reader = made.params.with_seed_of(copy), made.readers[copy] if made.readers else None
            begin = partial(self._start, number, made.ids, made.text, seeded, options, kept=made.kept, reader=reader)
            self._inbox.put(partial(self._add, stream, number, begin))
        if self._is_closed or self._failure is not None:
            stream.put(self._error())
        try:
            yield stream
        finally:
            for number in stream.unfinished:
                self._inbox.put(partial(self._end, number, FinishReason.ABORT))

    def _prepared(self, prompt: Prompt, params: SamplingParams, n: int, use: ToolUse) -> _Prompt:
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            (conversation,) = conversations_of(prompt)
            chats, (ids, params) = self._conversations, self._chat_prompt(conversation, use, params)
            self._compile([params])
            readers = [chats.reader(ids, use) for _ in range(n)]
            return _Prompt(None, ids, params, True, readers, chats.kept(use))
        self._compile([params])
        if use.functions:
            raise ParameterError("tools", "tools need a conversation: a list of messages with a role and a content")
        prompts = prompts_of(prompt)
        if len(prompts) != 1:
            raise ParameterError(
                "prompt", f"prompt must be one text, conversation or list of token ids, got {len(prompts)}"
            )
        (only,) = prompts
        return (
            _Prompt(only, self.tokenizer.encode(only), params) if isinstance(only, str) else _Prompt(None, only, params)
        )

    async def _next(self, stream: _Stream) -> Chunk:
        item = await stream.mailbox.get()
        if isinstance(item, Exception):
            raise item
        number, output = item
        sequence = stream.running[number]
        choice, generation = sequence.choice, sequence.generation
        text = "" if choice.finish_reason is not None else choice.take(output)
        reason, answer = choice.finish_reason, stream.answers.get(number)
        delta: dict[str, Any] | None = None if answer is None else {}
        if number in stream.unfinished:
            generation.add(output, text)
            if answer is not None:
                parts = choice.take_parts(text)
                answer += parts
                delta = delta_of(parts)
            if reason is not None:
                generation.finish_reason = reason
                if answer is not None:
                    generation.message = message_of(answer)
                    has_calls = "tool_calls" in generation.message
                    generation.finish_reason = finish_reason_of(reason, has_calls=has_calls)
                stream.unfinished.discard(number)
                # The engine does not know stop strings and would continue to generate.
                self._inbox.put(partial(self._end, number, output.reason or FinishReason.STOP))
        token_ids = [] if output.token is None else [output.token]
        return Chunk(stream.ids.index(number), text, token_ids, generation.finish_reason, delta)

    # -- the engine's thread ------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self._handle_inbox():
                events = self._loop.step()
                self._loop.submit()
                self._deliver(events)
        except Exception as error:
            self._failure = error
        for stream in self._streams.values():
            stream.put(self._error())

    def _handle_inbox(self) -> bool:
        """Handle the requests of callers; return False once closed. Blocks while nothing can run."""
        is_idle = self._loop.idle and not self._loop.core.scheduler.events
        timeout = None if is_idle else _PAUSE_S if self._is_stuck else 0.0
        while True:
            try:
                act = self._inbox.get(timeout != 0.0, timeout)
            except queue.Empty:
                return True
            if act is None:
                return False
            act()
            timeout = 0.0

    def _add(self, stream: _Stream, number: int, begin: Callable[[], Running]) -> None:
        try:
            stream.running[number] = begin()
            self._streams[number] = stream
        except (ParameterError, RequestTooLargeError) as error:
            stream.put(error)

    def _end(self, number: int, reason: FinishReason) -> None:
        if (stream := self._streams.pop(number, None)) is not None:
            self._loop.abort(number, reason)
            self._learn(stream.running[number], reason)

    def _deliver(self, events: list[Event]) -> None:
        self._is_stuck = not events
        for event in events:
            if isinstance(event, Admitted) and (stream := self._streams.get(event.request.id)) is not None:
                stream.running[event.request.id].generation.admitted(event)
        for number, output in outputs_of(events).items():
            if (stream := self._streams.get(number)) is not None:
                stream.put((number, output))

    def _error(self) -> Exception:
        if self._failure is None:
            return RuntimeError("this AsyncLLM is closed: make another one to generate")
        error = RuntimeError(f"the engine has failed: {self._failure}")
        error.__cause__ = self._failure
        return error
