from __future__ import annotations

import re
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from skipjoin.engine.text import Choice, TextRules
from skipjoin.formats.calls import Part, PartKind
from skipjoin.formats.message import MessageReader
from skipjoin.server.api.chat import ChatEndpoint, chat_logprob
from skipjoin.server.api.chat_body import ChatRequest
from skipjoin.server.api.chat_prompt import render_chat
from skipjoin.server.api.dialects.bodies import ConvertedBody
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.generation import Endpoint, Prompt
from skipjoin.server.api.jobs import Format
from skipjoin.server.api.responses import ChatTokenLogprob, Usage, encode
from skipjoin.server.api.service import Service
from skipjoin.server.api.tokens import MAX_TOKENS


@dataclass(slots=True, eq=False)
class Segment:
    kind: PartKind
    index: int
    call: int | None = None
    name: str = ""
    id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Change(NamedTuple):
    segment: Segment
    text: str = ""
    begins: bool = False
    ends: bool = False


class Segments:
    def __init__(self) -> None:
        self.found: list[Segment] = []
        self._open: Segment | None = None

    def add(self, parts: Sequence[Part]) -> Iterator[Change]:
        for part in parts:
            segment = self._open
            if segment is None or (segment.kind, segment.call) != (part.kind, part.call):
                yield from self.close()
                segment = self._begin(part)
                yield Change(segment, begins=True)
            if part.text:
                segment.pieces.append(part.text)
                yield Change(segment, part.text)

    def close(self) -> Iterator[Change]:
        if self._open is not None:
            segment, self._open = self._open, None
            yield Change(segment, ends=True)

    def finish(self) -> Iterator[Change]:
        """End the message, which has at least one segment."""
        if not self.found:
            yield Change(self._begin(Part("")), begins=True)
        yield from self.close()

    def _begin(self, part: Part) -> Segment:
        self._open = Segment(part.kind, len(self.found), part.call, part.name, part.id)
        self.found.append(self._open)
        return self._open


def whole_of(choice: Choice, text: str) -> list[Segment]:
    segments = Segments()
    for _ in (*segments.add(choice.take_parts(text)), *segments.finish()):
        pass
    return segments.found


ConvertedT = TypeVar("ConvertedT", bound=ConvertedBody)


class ConvertedEndpoint(Endpoint[ConvertedT]):
    """Generates as chat does. `names` are patterns of chat's fields, with what errors name instead."""

    names: ClassVar[Mapping[str, str]] = {}
    ends_with_context: ClassVar[bool] = False

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._chat = ChatEndpoint(service, ends_with_context=self.ends_with_context)

    def estimates(self, body: ConvertedT) -> list[int]:
        return self._chat.estimates(body.chat)

    async def tokenize(self, body: ConvertedT, client: str) -> list[Prompt]:
        return await self.tokenize_chat(body.chat, body, client)

    async def tokenize_chat(self, chat: ChatRequest, body: ConvertedT, client: str) -> list[Prompt]:
        try:
            return await self._chat.tokenize(chat, client)
        except ApiError as error:
            raise renamed(error, self.names_of(body)) from None

    def names_of(self, body: ConvertedBody) -> dict[str, str]:
        places = {rf"tools\.{n}\.function\.parameters": place for n, place in enumerate(body.schema_places())}
        return {**places, **self.names}

    def text_rules(self, body: ConvertedT) -> TextRules:
        return self._chat.text_rules(body.chat)

    def reader(self, body: ConvertedT, prompt: Prompt) -> MessageReader | None:
        return self._chat.reader(body.chat, prompt)


class ConvertedFormat(Format):
    prefix: str

    def __init__(self, service: Service, body: ConvertedBody) -> None:
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self.model, self._tokenizer = service.shown_model(body.model), service.tokenizer
        self.top = body.chat.top_logprobs or 0 if body.chat.logprobs else None
        self.segments = Segments()
        self.started: Choice | None = None

    @property
    def choice(self) -> Choice:
        assert self.started is not None
        return self.started

    def whole(self, texts: Mapping[Choice, str], usage: Usage) -> bytes:
        ((self.started, text),) = texts.items()
        self.segments.found = whole_of(self.started, text)
        return encode(self.complete(usage))

    @abstractmethod
    def complete(self, usage: Usage) -> dict[str, Any]: ...

    def take_logprobs(self) -> list[ChatTokenLogprob]:
        if self.top is None or self.started is None:
            return []
        return [chat_logprob(self._tokenizer, scored, self.top) for scored in self.started.take_scored_text()]


async def prompt_tokens(service: Service, chat: ChatRequest, names: Mapping[str, str]) -> int:
    try:
        text = await render_chat(service, chat)
        return len(await service.encode(text, "messages", add_special_tokens=False, most=MAX_TOKENS))
    except ApiError as error:
        raise renamed(error, names) from None


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    for pattern, name in names.items():
        if error.param is not None and (found := re.fullmatch(pattern, error.param)):
            param = found.expand(name)
            message = error.message.replace(error.param, param)
            return ApiError(error.status, message, code=error.code, param=param, headers=error.headers)
    return error
