from __future__ import annotations

import base64
import time
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import starmap
from typing import Any, TypeVar

from skipjoin.core.request import FinishReason, RequestOptions
from skipjoin.engine.text import Choice, Output, TextRules
from skipjoin.model.errors import ModelError
from skipjoin.model.tokenizer import TooManyTokensError
from skipjoin.pooling import Pooling, Task, cosine, values_of
from skipjoin.routes import EMBEDDINGS, RERANK, SCORE
from skipjoin.sampling import ContextLengthError, pooled
from skipjoin.server.api import pooled_bodies
from skipjoin.server.api.errors import ApiError, bad_request, from_parameter
from skipjoin.server.api.forecasting import Expectation
from skipjoin.server.api.generation import Endpoint, Prompt
from skipjoin.server.api.jobs import Format
from skipjoin.server.api.limits import estimate_tokens
from skipjoin.server.api.responses import Usage, encode
from skipjoin.server.api.service import Service

PooledT = TypeVar("PooledT", bound=pooled_bodies.PooledBody)
PairsT = TypeVar("PairsT", bound=pooled_bodies.PairsBody)
# Texts that are tokenized at a time.
_AT_ONCE = 32


class VectorChoice(Choice):
    vector = b""

    def take(self, output: Output) -> str:
        if output.detail is not None:
            self.vector = output.detail.vector
        if output.reason is not None:
            self.finish_reason = FinishReason.STOP.value
        return ""

    @property
    def values_to_format(self) -> int:
        return len(self.vector) // 4


class PooledFormat(Format):
    prefix: str

    def __init__(self, service: Service, body: Any, options: RequestOptions) -> None:
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.model, self.body, self._task = service.shown_model(body.model), body, service.info.task

    def whole(self, texts: Mapping[Choice, str], usage: Usage) -> bytes:
        vectors = [choice.vector for choice in texts if isinstance(choice, VectorChoice)]
        return encode(self.made(vectors, {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}))

    @abstractmethod
    def made(self, vectors: Sequence[bytes], usage: dict[str, int]) -> dict[str, Any]: ...

    def listed(self, data: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        head = {"id": self.id, "created": self.created, "model": self.model}
        return {**head, "data": data, "usage": usage, "object": "list"}

    def scores(self, vectors: Sequence[bytes]) -> list[float]:
        values = [values_of(vector) for vector in vectors]
        if self._task is Task.SCORE:
            return [value[0] for value in values]
        firsts = len(self.body.firsts)
        return [cosine(values[first], values[firsts + second]) for first, second in self.body.pairs]


class EmbeddingFormat(PooledFormat):
    prefix = "embd"

    def made(self, vectors: Sequence[bytes], usage: dict[str, int]) -> dict[str, Any]:
        is_text = self.body.encoding_format == "base64"
        shown = [base64.b64encode(vector).decode() if is_text else values_of(vector).tolist() for vector in vectors]
        data = [{"index": at, "embedding": values, "object": "embedding"} for at, values in enumerate(shown)]
        return self.listed(data, usage)


class RankingFormat(PooledFormat):
    prefix = "rerank"

    def made(self, vectors: Sequence[bytes], usage: dict[str, int]) -> dict[str, Any]:
        ranked = sorted(enumerate(self.scores(vectors)), key=lambda pair: (-pair[1], pair[0]))[: self.body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in ranked]
        if self.body.return_documents is not False:
            texts = self.body.seconds
            results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
        return {"id": self.id, "model": self.model, "results": results, "usage": usage}


class ScoreFormat(PooledFormat):
    prefix = "score"

    def made(self, vectors: Sequence[bytes], usage: dict[str, int]) -> dict[str, Any]:
        scores = enumerate(self.scores(vectors))
        return self.listed([{"index": index, "score": score, "object": "score"} for index, score in scores], usage)


class PooledEndpoint(Endpoint[PooledT]):
    operation = "embeddings"

    async def expect(self, prompts: Sequence[Prompt], owner: str) -> list[Expectation]:
        return [Expectation() for _ in prompts]

    def choice(self, index: int, prompt: Prompt, rules: TextRules, body: PooledT) -> Choice:
        return VectorChoice(index, prompt.ids, prompt.text, self.service.tokenizer, rules)

    async def encode(self, texts: Sequence[str], param: str) -> list[list[int]]:
        found: list[list[int]] = []
        for at in range(0, len(texts), _AT_ONCE):
            some = texts[at : at + _AT_ONCE]
            try:
                found += await self.service.in_thread(self.service.tokenizer.encode_many, some, self.max_tokens)
            except TooManyTokensError as error:
                raise self.too_long(param, error.found) from None
        self.check_ids(found, param)
        return found

    @property
    def max_tokens(self) -> int:
        return self.service.info.max_model_len

    def too_long(self, param: str, found: object) -> ApiError:
        return from_parameter(ContextLengthError.of_input(param, self.max_tokens, found))

    def check_ids(self, found: Sequence[Sequence[int]], param: str) -> None:
        for ids in found:
            if not ids:
                raise bad_request(f"{param} must have at least 1 token", param)
            if len(ids) > self.max_tokens:
                raise self.too_long(param, len(ids))
            self.service.check_prompt(ids, param)


class EmbeddingEndpoint(PooledEndpoint[pooled_bodies.EmbeddedBody]):
    """Embed texts."""

    route = EMBEDDINGS
    tasks = (Task.EMBED,)
    body_type: type[pooled_bodies.EmbeddedBody] = pooled_bodies.EmbeddingRequest
    format_type: type[PooledFormat] = EmbeddingFormat

    def estimates(self, body: pooled_bodies.EmbeddedBody) -> list[int]:
        return [estimate_tokens(text) for text in body.inputs]

    async def tokenize(self, body: pooled_bodies.EmbeddedBody, client: str) -> list[Prompt]:
        largest = self.service.info.dimensions
        if body.dimensions is not None and body.dimensions > largest:
            raise bad_request(f"dimensions must be in [1, {largest}], got {body.dimensions}", "dimensions")
        params, inputs = pooled(Pooling(dimensions=body.dimensions)), body.inputs
        texts = [text for text in inputs if isinstance(text, str)]
        found = [text for text in inputs if not isinstance(text, str)]
        if texts:
            found = await self.encode(texts, self.route.prompt)
        else:
            self.check_ids(found, self.route.prompt)
        return [Prompt(ids, None, params) for ids in found]


class PairsEndpoint(PooledEndpoint[PairsT]):
    """Scores pairs: a model of scores reads both texts, and one of embeddings each of them."""

    tasks = (Task.EMBED, Task.SCORE)
    _params: tuple[str, str]  # fields with the first and the second texts

    def estimates(self, body: PairsT) -> list[int]:
        if self.service.info.task is Task.EMBED:
            return [estimate_tokens(text) for text in (*body.firsts, *body.seconds)]
        return [estimate_tokens(first) + estimate_tokens(second) for first, second in _texts(body)]

    async def tokenize(self, body: PairsT, client: str) -> list[Prompt]:
        if self.service.info.task is Task.EMBED:
            firsts = await self.encode(body.firsts, self._params[0])
            seconds = await self.encode(body.seconds, self._params[1])
            return [Prompt(ids, None, pooled(Pooling())) for ids in (*firsts, *seconds)]
        service, texts = self.service, _texts(body)
        encode = partial(service.tokenizer.encode_pair, most=self.max_tokens, asks=service.info.asks_pairs)
        prompts: list[Prompt] = []
        for at in range(0, len(texts), _AT_ONCE):
            try:
                found = await service.in_thread(lambda some: list(starmap(encode, some)), texts[at : at + _AT_ONCE])
            except TooManyTokensError as error:
                raise self.too_long(self._params[1], error.found) from None
            except ModelError as error:  # of the chat template
                raise bad_request(str(error), "model") from error
            prompts += [Prompt(ids, None, pooled(Pooling(second=second))) for ids, second in found]
        self.check_ids([prompt.ids for prompt in prompts], self._params[1])
        return prompts


class RerankEndpoint(PairsEndpoint[pooled_bodies.RerankRequest]):
    """Sort documents by how well they fit a query."""

    route = RERANK
    body_type = pooled_bodies.RerankRequest
    format_type = RankingFormat
    _params = ("query", "documents")


class ScoreEndpoint(PairsEndpoint[pooled_bodies.ScoreRequest]):
    """Score pairs of texts."""

    route = SCORE
    body_type = pooled_bodies.ScoreRequest
    format_type = ScoreFormat
    _params = ("text_1", "text_2")


def _texts(body: pooled_bodies.PairsBody) -> list[tuple[str, str]]:
    firsts, seconds = body.firsts, body.seconds
    return [(firsts[first], seconds[second]) for first, second in body.pairs]
