from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from skipjoin.adapters import Adapter, AdapterNames
from skipjoin.chat import Conversations, ToolUse
from skipjoin.config import ConfigError, ServerConfig
from skipjoin.engine.forecasting import ForecastKeeper
from skipjoin.formats.message import load_parser
from skipjoin.model.folder import model_id
from skipjoin.model.grammar_check import GrammarCheck
from skipjoin.model.tokenizer import Tokenizer, TooManyTokensError
from skipjoin.pooling import Task, wrong_task
from skipjoin.sampling import BadWords, ContextLengthError, ParameterError, SamplingParams, ThinkingBudget, check_ids
from skipjoin.server.api.arrivals import ArrivalLog
from skipjoin.server.api.errors import (
    ApiError,
    bad_request,
    from_parameter,
    from_validation,
    model_not_found,
    unavailable,
)
from skipjoin.server.api.fields import Body, given
from skipjoin.server.api.forecasting import AskFor, Expectation, Forecasting
from skipjoin.server.api.limits import Admission
from skipjoin.server.api.protocol import GenerationBody
from skipjoin.server.api.request_index import RequestIndex
from skipjoin.server.api.shapes import checked
from skipjoin.server.api.stored import ResponseStore
from skipjoin.server.api.structured import structured_output
from skipjoin.server.api.unknown_fields import MAX_PASSED, UNKNOWN, UnknownFields, with_suggestion
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.errors import EngineDeadError, EngineHungError, NoReplicaError
from skipjoin.server.engines.messages import Ready
from skipjoin.server.metrics import Metrics
from skipjoin.structured_output import GrammarError, StructuredOutput

# Longer texts and bodies are processed in a thread, so that streams do not stall.
_LARGE = 8192

# Values of sharing that share between others than API keys, and what errors call these.
CLIENT_KINDS = {"user": "user", "adapter": "adapter"}

BodyT = TypeVar("BodyT", bound=Body)
ResultT = TypeVar("ResultT")


class Phase(Enum):
    STARTING = "starting"
    OPEN = "open"
    DRAINING = "draining"


class Service:
    """Shared state of one server. `busy` counts its generation requests over HTTP."""

    def __init__(
        self,
        config: ServerConfig,
        client: EngineClient,
        metrics: Metrics,
        lora_modules: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self.client = client
        self.metrics = metrics
        self.admission = Admission(
            config.max_queued_requests,
            config.max_queued_tokens,
            metrics,
            steps=lambda: client.steps,
            is_shared=config.sharing in CLIENT_KINDS or (config.sharing == "key" and len(set(config.api_keys)) > 1),
            client_kind=CLIENT_KINDS.get(config.sharing, "API key"),
        )
        self.adapters = AdapterNames(lora_modules, client.adapters.unload)
        metrics.set("adapters", len(lora_modules))
        self.index = RequestIndex()
        self.arrivals = ArrivalLog()
        self.stored_responses: ResponseStore | None = None
        self.phase = Phase.STARTING
        self.created = int(time.time())
        self.name = config.served_model_name or ""
        self.names: tuple[str, ...] = (self.name,)
        self.busy = 0
        self._info: Ready | None = None
        self._tokenizer: Tokenizer | None = None
        self._sampling_defaults: Mapping[str, Any] = {}
        self._forecasting: Forecasting | None = None
        self.conversations: Conversations
        self._has_parser = False
        self._unknown_fields = UnknownFields()
        # Two threads, so that one huge text does not delay all others.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="skipjoin-text")
        # One thread, because a single process renders chat templates.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="skipjoin-template")
        self._grammars: GrammarCheck | None = None

    def open(
        self,
        info: Ready,
        tokenizer: Tokenizer,
        keeper: ForecastKeeper | None = None,
        ask: AskFor | None = None,
        *,
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Accept requests. Without a `keeper` there are no forecasts. Those of `ask` take precedence."""
        self._info, self._tokenizer = info, tokenizer
        self._grammars = GrammarCheck(info.folder, info.vocab_size, tokenizer.eos_token_ids)
        self._grammars.start()
        self._sampling_defaults = sampling_defaults or {}
        if keeper is not None:
            self._forecasting = Forecasting(keeper, self.metrics, ask)
        self.names = _names(self.config, info)
        self.name = self.names[0]
        of_adapters = (adapter.name for adapter in self.adapters.all)
        if (taken := next((name for name in of_adapters if name in self.names), None)) is not None:
            raise ConfigError(f"lora_modules: {taken} is the name of the model: choose another")
        self.conversations = Conversations(tokenizer, self.config.tool_format)
        if self.conversations.is_read(ToolUse()):
            self._threads.submit(load_parser)  # every chat request needs it
        self.metrics.ready(info, self.name)
        if self.phase is Phase.STARTING:
            self.phase = Phase.OPEN

    async def load_parser(self) -> None:
        if not self._has_parser:
            await self.in_thread(load_parser)
            self._has_parser = True

    def drain(self) -> None:
        self.phase = Phase.DRAINING

    def close(self) -> None:
        if self._forecasting is not None:
            self._forecasting.close()
        if self._grammars is not None:
            self._grammars.close()
        for threads in (self._threads, self._renderer):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._tokenizer is not None:
            self._tokenizer.close()

    # -- state --------------------------------------------------------------------------------------------

    @property
    def info(self) -> Ready:
        if self._info is None:
            raise unavailable("the server is starting: the model is being loaded", "starting")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise unavailable("the server is starting: the model is being loaded", "starting")
        return self._tokenizer

    def check_alive(self) -> None:
        if self.client.dead:
            raise EngineDeadError
        _ = self.info
        if not self.client.alive:
            raise NoReplicaError
        if self.client.is_hung:
            raise EngineHungError

    def count_replicas(self) -> dict[str, int]:
        client = self.client
        return {"replicas_alive": client.alive, "replicas": client.wanted} if client.wanted > 1 else {}

    def check_open(self) -> None:
        self.check_alive()
        if self.phase is Phase.DRAINING:
            self.metrics.count("admission_rejected_total", "draining")
            raise unavailable("the server is shutting down", "shutting_down")

    def check_model(self, name: str | None) -> Adapter | None:
        """Return the adapter that a body names as its model. Raise 404 for an unknown model."""
        _ = self.info  # until the model is loaded, no name is known
        if (adapter := self.adapters.find(name)) is None and name is not None and name not in self.names:
            raise model_not_found(name, self.served_names)
        return adapter

    @property
    def served_names(self) -> tuple[str, ...]:
        return *self.names, *(adapter.name for adapter in self.adapters.all)

    def shown_model(self, name: str | None) -> str:
        return self.name if (adapter := self.adapters.find(name)) is None else adapter.name

    def add_adapter(self, adapter: Adapter) -> None:
        self.adapters.add(adapter)
        self.metrics.set("adapters", len(self.adapters.all))

    def remove_adapter(self, name: str) -> None:
        self.adapters.remove(name)
        self.metrics.set("adapters", len(self.adapters.all))

    def check_task(self, tasks: Collection[Task]) -> None:
        if self.info.task not in tasks:
            raise bad_request(wrong_task(self.name, self.info.task), "model")

    # -- reading requests ---------------------------------------------------------------------------------

    async def in_thread(self, work: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))

    async def in_renderer(self, work: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._renderer, partial(work, *args, **kwargs))

    async def parse(self, body: bytes, kind: type[BodyT]) -> BodyT:
        for _ in range(MAX_PASSED if self.config.unknown_fields == "warn" else 0):
            try:
                return await self._validated(body, kind)
            except ApiError as error:
                if error.code != UNKNOWN:
                    raise
                body = await self.in_thread(self._unknown_fields.without, body, error)
        try:
            return await self._validated(body, kind)
        except ApiError as error:
            raise with_suggestion(error, kind) if error.code == UNKNOWN else error from None

    async def _validated(self, body: bytes, kind: type[BodyT]) -> BodyT:
        try:
            if len(body) > _LARGE:
                return await self.in_thread(_read_large, body, kind)
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error) from error

    # -- tokens -------------------------------------------------------------------------------------------

    @property
    def max_prompt_tokens(self) -> int:
        return self.info.max_model_len - 1

    async def encode(
        self, text: str, param: str, *, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        encode, most = self.tokenizer.encode, self.max_prompt_tokens if most is None else most
        try:
            if len(text) > _LARGE:
                return await self.in_thread(encode, text, add_special_tokens, most)
            return encode(text, add_special_tokens, most)
        except TooManyTokensError as error:
            if most == self.max_prompt_tokens:
                raise self.too_long(param, error.found) from None
            raise bad_request(f"{param} must have at most {most} tokens, got {error.found}", param) from None

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(ids) > _LARGE:
            return await self.in_thread(self.tokenizer.decode_long, ids, skip_special_tokens)
        return self.tokenizer.decode(ids, skip_special_tokens)

    def too_long(self, param: str, found: object) -> ApiError:
        return from_parameter(ContextLengthError.of_prompt(param, self.info.max_model_len, found))

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Raise 400 for ids that neither model nor tokenizer has."""
        known = max(self.info.vocab_size, self.tokenizer.vocab_size)
        try:
            check_ids(name, ids, known)
        except ParameterError as error:
            raise from_parameter(error) from None

    def check_prompt(self, ids: Sequence[int], param: str) -> None:
        """Raise 400 for tokens that only the tokenizer has."""
        size = self.info.vocab_size
        if ids and (last := max(ids)) >= size:
            text = self.tokenizer.token_text(last)
            known = f" ({text!r}, which its tokenizer knows and the model does not: leave it out)" if text else ""
            raise bad_request(f"{param} must be token ids in [0, {size - 1}], got {last}{known}", param)

    def room_after(self, prompt: Sequence[int], param: str) -> int:
        context = self.info.max_model_len
        self.check_prompt(prompt, param)
        if not prompt:
            raise bad_request(f"{param} must have at least 1 token", param)
        if len(prompt) >= context:
            raise self.too_long(param, len(prompt))
        return context - len(prompt)

    def check_fits(self, name: str, tokens: int | None, prompt: Sequence[int], param: str) -> None:
        context = self.info.max_model_len
        if tokens is not None and tokens > context - len(prompt):
            raise from_parameter(ContextLengthError.of_output(name, tokens, context, len(prompt), param))

    async def expect(self, prompts: Sequence[tuple[list[int], SamplingParams]], owner: str) -> list[Expectation]:
        if self._forecasting is None:
            return [Expectation() for _ in prompts]
        return await self._forecasting.expect([(ids, params.output_limit) for ids, params in prompts], owner)

    def check_prompt_scores(self, tokens: int, alternatives: int, n: int, *, names: str, param: str) -> None:
        most, asked = self.config.max_prompt_scores, tokens * (1 + alternatives) * n
        if asked > most:
            raise bad_request(
                f"{names} must ask for at most {most} log-probabilities of prompts, which are "
                f"{tokens} tokens, times 1 + {param}, times n: {asked}",
                param,
            )

    # -- sampling -----------------------------------------------------------------------------------------

    async def structured_output(self, body: GenerationBody, client: str) -> StructuredOutput | None:
        structured, field = structured_output(body)
        if structured is not None:
            await self.check_grammar(structured, field, client)
        return structured

    async def check_grammar(self, structured: StructuredOutput, field: str, client: str) -> None:
        assert self._grammars is not None
        try:
            await asyncio.wrap_future(self._grammars.submit(structured, client))
        except GrammarError as error:
            raise bad_request(f"{field} {error}", field) from None

    def sampling(
        self,
        body: GenerationBody,
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        structured: StructuredOutput | None = None,
        thinking: ThinkingBudget | None = None,
    ) -> SamplingParams:
        own = {
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "structured_outputs": structured,
            "bad_words": self._bad_words(body.bad_words) if body.bad_words else None,
            "thinking_budget": thinking,
        }
        values = {**self._sampling_defaults, **given(body, SamplingParams), **own}
        try:
            params = SamplingParams(max_tokens=max_tokens, **values)
            params.check_ids(self.info.vocab_size)
        except ParameterError as error:
            raise from_parameter(error) from error
        self.metrics.observe("request_params_n", body.n or 1)
        return params

    def _bad_words(self, words: Sequence[str]) -> BadWords:
        """Return words as tokens, at the beginning of a text and after a space."""
        bare = [word.lstrip() for word in words]
        texts = [*words, *bare, *(f" {word}" for word in bare)]
        encoded = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts if text)
        return BadWords(tuple(dict.fromkeys(filter(None, encoded))))


def _read_large(body: bytes, kind: type[BodyT]) -> BodyT:
    return kind.model_validate_json(checked(body, kind))


def _names(config: ServerConfig, info: Ready) -> tuple[str, ...]:
    if config.served_model_name is not None:
        return (config.served_model_name,)
    name, path = model_id(info.model, info.folder), info.model.rstrip("/")
    # Clients of vLLM send the path, which no response shows.
    paths = (info.model, path, os.path.abspath(path)) if name != info.model else ()
    return tuple(dict.fromkeys((name, *filter(None, paths))))
