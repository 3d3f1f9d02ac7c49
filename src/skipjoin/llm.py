"""Generation in this process: the engine without a server around it."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from numbers import Integral
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from skipjoin.config import EngineConfig, ForecastConfig
from skipjoin.core.events import Admitted, Event, Finished, Token
from skipjoin.core.request import NO_TARGET, FinishReason, RequestOptions, ServiceClass, Target
from skipjoin.engine.build import Engine, assemble
from skipjoin.engine.forecasting import Predicted, chosen_forecasts, is_exact, open_keeper
from skipjoin.engine.load import model_folder
from skipjoin.engine.loop import EngineLoop
from skipjoin.engine.text import Choice, Output, TextRules
from skipjoin.model.generation_config import sampling_defaults
from skipjoin.model.tokenizer import Tokenizer, load_tokenizer
from skipjoin.options import settings_of
from skipjoin.sampling import MAX_SALT, ParameterError, SamplingParams, TokenDetail

Message = Mapping[str, Any]
Salts = str | Sequence[str | None] | None


@dataclass(slots=True)
class Generation:
    """The outcome of one prompt.

    text, token_ids: the output. finish_reason: "stop", "length", or "error" where the engine gave the request up;
    error: what happened then, and what helps. details: per token, if log-probabilities were asked for; the first one
    also has those of the prompt. cached_tokens: tokens of the prompt whose KV was there when it first ran.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    details: list[TokenDetail] = field(default_factory=list)
    error: str = ""
    cached_tokens: int = 0

    def add(self, output: Output, text: str) -> None:
        """Add a token, or the end, and its text."""
        self.text += text
        if output.token is not None:
            self.token_ids.append(output.token)
        if output.detail is not None:
            self.details.append(output.detail)
        self.error = output.error


@dataclass(frozen=True, slots=True)
class _Running:
    """A request that has not ended. predicted: what is expected of it; None without a forecaster."""

    generation: Generation
    choice: Choice
    predicted: Predicted | None


class LLM:
    """A model that is ready to generate. Use it as a context manager, or call `close`.

    model: a Hugging Face folder, a hub id, or "tally", the built-in model. settings: fields of `EngineConfig`
    and `ForecastConfig`. default_params: of prompts that are given none, with the sampling defaults of the model's
    generation_config.json. progress: whether progress bars are shown on stderr; None: if it is a terminal.
    Raises `ModelError` and `ConfigError` as `assemble` does.
    """

    def __init__(self, model: str = "tally", *, progress: bool | None = None, **settings: Any) -> None:
        self._console = Console(stderr=True, quiet=not (sys.stderr.isatty() if progress is None else progress))
        given = {name: settings.pop(name) for name in settings_of(ForecastConfig) if name in settings}
        config = EngineConfig(model=model, **settings)
        forecasts = chosen_forecasts(ForecastConfig(**given), config)
        # The tokenizer first: it fails fast.
        folder = model_folder(model, config.load_format)
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        if self.tokenizer.chat_template is not None:
            self.tokenizer.chat_template.check()
        self.default_params = SamplingParams(**sampling_defaults(folder, config.generation_config))
        with self._progress() as bars:
            task = bars.add_task("loading", total=1.0)
            self.engine: Engine = assemble(
                config,
                lambda what, share: bars.update(task, description=what, completed=share),
            )
        info = self.engine.info
        try:
            self._forecasts = forecasts and open_keeper(
                forecasts, model=info.model, folder=info.folder, text_of=self.tokenizer.decode
            )
        except BaseException:
            self.engine.executor.close()
            raise
        self._loop = EngineLoop(self.engine)
        self._next_id = 0
        self._is_closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine, and save what was learnt of output lengths. It may be called again; generation afterwards
        raises RuntimeError."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._forecasts is not None:
            self._forecasts.close()
        self.tokenizer.close()
        self._loop.close()

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        service: str = ServiceClass.REAL_TIME,
        priority: int = 0,
        target: Target = NO_TARGET,
        cache_salt: Salts = None,
    ) -> list[Generation]:
        """Complete one prompt or many, each a text or its token ids; results are in the order of the prompts.

        params: one for all prompts, or one for each; None: `default_params`. service: "best-effort" prompts run on what
        real-time ones leave, and have no objectives for first and further tokens. priority: lower is earlier. target:
        soft objectives of each prompt, in seconds above 0. cache_salt: one for all prompts, or one for each, of 1 to
        256 characters; prompts use the KV of earlier ones with the same salt alone; None: of those without one.

        Raises `ParameterError`, before anything runs, for a prompt, parameter, class, objective or salt outside its
        bounds, and RuntimeError after `close`.
        """
        given = _as_list(prompts)
        ids = [self.tokenizer.encode(item) if isinstance(item, str) else item for item in given]
        texts = [item if isinstance(item, str) else None for item in given]
        return self._run(ids, texts, params, _options(service, priority, target), cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        service: str = ServiceClass.REAL_TIME,
        priority: int = 0,
        target: Target = NO_TARGET,
        cache_salt: Salts = None,
    ) -> list[Generation]:
        """Answer one conversation or many through the model's chat template, each a list of messages with a role and a
        content. See `generate`."""
        ids = [self.tokenizer.chat(conversation) for conversation in _conversations(messages)]
        return self._run(ids, [None] * len(ids), params, _options(service, priority, target), cache_salt)

    def _run(
        self,
        ids: list[list[int]],
        texts: Sequence[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions,
        cache_salt: Salts,
    ) -> list[Generation]:
        if self._is_closed:
            raise RuntimeError("this LLM is closed: make another one to generate")
        each = _per_prompt(self.default_params if params is None else params, len(ids))
        salted = [replace(options, cache_salt=salt) for salt in _salts(cache_salt, len(ids))]
        running: dict[int, _Running] = {}
        try:
            for prompt, text, one, asked in zip(ids, texts, each, salted, strict=True):
                self._loop.add(self._next_id, prompt, one, options=asked)
                rules = TextRules(stop=one.stop, min_tokens=one.min_tokens)
                choice = Choice(0, prompt, text, self.tokenizer, rules)
                predicted = self._forecast(self._next_id, prompt, one)
                running[self._next_id] = _Running(Generation(text, prompt), choice, predicted)
                self._next_id += 1
            results = [one.generation for one in running.values()]
            # A stop string ends a request between two steps, so that the next one must not have begun.
            ahead = not any(one.stop for one in each)
            with self._progress() as bars:
                self._drain(running, bars, bars.add_task("generating", total=len(ids)), ahead=ahead)
        finally:
            # A refused prompt or an interrupt must not leave the others running.
            for request_id, one in running.items():
                self._loop.abort(request_id)
                self._learn(one, FinishReason.ABORT)
        return results

    def _drain(self, running: dict[int, _Running], bars: Progress, task: TaskID, *, ahead: bool) -> None:
        """Run the loop until all requests have ended. ahead: make text of a step's tokens while the next one runs."""
        cached: dict[int, int] = {}
        while running:
            events = self._loop.step()
            if ahead:
                self._loop.submit()
            for event in events:
                if isinstance(event, Admitted):
                    cached.setdefault(event.request.id, event.cached)
            for request_id, output in _outputs(events).items():
                if request_id not in running:
                    continue
                one = running[request_id]
                one.generation.add(output, one.choice.take(output))
                if one.choice.finish_reason is not None:
                    one.generation.finish_reason = one.choice.finish_reason
                    one.generation.cached_tokens = cached.get(request_id, 0)
                    # If a stop string ended the text, the engine still generates.
                    self._loop.abort(request_id, FinishReason.STOP)
                    self._learn(one, output.reason or FinishReason.STOP)
                    del running[request_id]
                    bars.advance(task)

    def _forecast(self, request_id: int, prompt: list[int], params: SamplingParams) -> Predicted | None:
        """Forecast the output of a request that the engine has taken; None without a forecaster."""
        if self._forecasts is None:
            return None
        most = params.max_tokens or self.engine.info.max_model_len - len(prompt)
        predicted = self._forecasts.forecast(prompt, most)
        self._loop.reforecast(request_id, predicted.forecast)
        return predicted

    def _learn(self, one: _Running, reason: FinishReason) -> None:
        """Learn how long the output of a request got."""
        tokens = len(one.generation.token_ids)
        if self._forecasts is not None and one.predicted is not None and tokens:
            self._forecasts.learn(one.predicted, tokens, exact=is_exact(reason))
            self._forecasts.save_if_due()

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console, transient=True, disable=self._console.quiet)


def _options(service: str, priority: int, target: Target) -> RequestOptions:
    """Raises `ParameterError` for a class that there is not, and an objective that is no time or not of the class."""
    if service not in tuple(ServiceClass):
        raise ParameterError("service", f"service must be one of {', '.join(ServiceClass)}, got {service!r}")
    for name, seconds in target._asdict().items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ParameterError(f"target.{name}", f"target.{name} must be a number above 0, got {seconds!r}")
        if service == ServiceClass.BEST_EFFORT and name != "jct_s" and seconds < inf:
            raise ParameterError(f"target.{name}", f"target.{name} must not be set with service {service}")
    return RequestOptions(service=ServiceClass(service), priority=priority, target=target)


def _salts(given: Salts, count: int) -> list[str]:
    """The salt of each of so many prompts; empty: it has none. Raises `ParameterError`."""
    salts = [given] * count if given is None or isinstance(given, str) else given
    if not isinstance(salts, list | tuple):
        raise ParameterError(
            "cache_salt", f"cache_salt must be a text, or one of them or None per prompt, got {_shown(given)}"
        )
    if len(salts) != count:
        raise ParameterError("cache_salt", f"cache_salt must be one, or one per prompt ({count}), got {len(salts)}")
    return [_salt(one) for one in salts]


def _salt(given: Any) -> str:
    if given is None:
        return ""
    if not isinstance(given, str):
        raise ParameterError("cache_salt", f"cache_salt must be a text or None, got {_shown(given)}")
    if not 1 <= len(given) <= MAX_SALT:
        raise ParameterError("cache_salt", f"cache_salt must have 1 to {MAX_SALT} characters, got {len(given)}")
    if any("\ud800" <= character <= "\udfff" for character in given):
        raise ParameterError("cache_salt", "cache_salt must be Unicode text, and half a surrogate pair is none")
    return given


def _outputs(events: Iterable[Event]) -> dict[int, Output]:
    """The outputs of a step's events, by request: a token, the end, or both."""
    outputs: dict[int, Output] = {}
    for event in events:
        if isinstance(event, Token):
            detail = event.detail if isinstance(event.detail, TokenDetail) else None
            outputs[event.request.id] = Output(token=event.token, detail=detail)
        elif isinstance(event, Finished):
            before = outputs.get(event.request.id, Output())
            outputs[event.request.id] = before._replace(reason=event.reason, error=event.detail)
    return outputs


def _as_list(prompts: Any) -> list[str | list[int]]:
    """The prompts, texts or token ids, from one or many. Raises `ParameterError` for what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    if items and isinstance(items[0], Integral):
        return [_token_ids(items)]
    return [item if isinstance(item, str) else _token_ids(_items(item)) for item in items]


def _items(given: Any) -> list[Any]:
    # A mapping can be iterated over, too: its keys are no prompts.
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise ParameterError(
            "prompts",
            f"prompts must be a text, token ids, or a list of such prompts, got {_shown(given)}",
        )
    return list(given)


def _shown(given: Any) -> str:
    return f"{type(given).__name__} {reprlib.repr(given)}"


def _token_ids(items: list[Any]) -> list[int]:
    for item in items:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise ParameterError("prompts", f"prompts: token ids must be integers, got {item!r}")
    return [int(item) for item in items]


def _conversations(given: Any) -> list[list[Message]]:
    """The conversations, from one or many. Raises `ParameterError` for what is none."""
    is_single = isinstance(given, Sequence) and bool(given) and isinstance(given[0], Mapping)
    conversations = [given] if is_single else given
    if not isinstance(conversations, list | tuple):
        raise _no_conversation(given)
    for conversation in conversations:
        if not isinstance(conversation, list | tuple) or not conversation:
            raise _no_conversation(conversation)
        for message in conversation:
            if not (isinstance(message, Mapping) and {"role", "content"} <= message.keys()):
                raise _no_conversation(message)
    return [list(conversation) for conversation in conversations]


def _no_conversation(got: Any) -> ParameterError:
    return ParameterError(
        "messages",
        "messages must be a list of messages such as {'role': 'user', 'content': 'Hello'}, or a list of such lists, "
        f"got {_shown(got)}",
    )


def _per_prompt(params: SamplingParams | Iterable[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    each = list(params)
    if isinstance(params, Mapping) or not all(isinstance(one, SamplingParams) for one in each):
        raise ParameterError(
            "params", f"params must be SamplingParams, or one of them per prompt, got {reprlib.repr(params)}"
        )
    if len(each) != count:
        raise ValueError(f"params must be one, or one per prompt ({count}), got {len(each)}")
    return each
