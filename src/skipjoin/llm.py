"""Offline inference: the engine in the calling process, without a server."""

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
from skipjoin.engine.forecasting import (
    ForecastKeeper,
    Predicted,
    chosen_forecasts,
    is_exact,
    open_keeper,
    state_folder,
)
from skipjoin.engine.load import model_folder
from skipjoin.engine.loop import EngineLoop
from skipjoin.engine.text import Choice, Output, TextRules
from skipjoin.llm_chat import Conversations, Message, ToolChoice, ToolUse, conversations_of, shown
from skipjoin.model.generation_config import sampling_defaults
from skipjoin.model.grammars import Grammars
from skipjoin.model.tokenizer import Tokenizer, load_tokenizer
from skipjoin.options import settings_of
from skipjoin.recipes import located_errors
from skipjoin.sampling import MAX_SALT, ParameterError, SamplingParams, TokenDetail
from skipjoin.structured_output import GrammarError, StructuredOutput

Salts = str | Sequence[str | None] | None
Constraint = StructuredOutput | Mapping[str, Any] | None


@dataclass(slots=True)
class Generation:
    """Result of one prompt.

    Attributes:
        text: Output as the model wrote it.
        finish_reason: "stop", "length", "tool_calls" after `chat` with calls, or "error" if the engine aborted the
            request.
        error: Cause and remedy of an "error"; otherwise empty.
        details: Log-probabilities per generated token, if requested; the first entry also has those of the prompt.
        cached_tokens: Prompt tokens found in the prefix cache when the request was first admitted.
        message: Answer of a conversation as a message in OpenAI's form, with `reasoning_content` and `tool_calls` if
            the model wrote any. It can be appended to the conversation.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    details: list[TokenDetail] = field(default_factory=list)
    error: str = ""
    cached_tokens: int = 0
    message: dict[str, Any] | None = None

    def add(self, output: Output, text: str) -> None:
        self.text += text
        if output.token is not None:
            self.token_ids.append(output.token)
        if output.detail is not None:
            self.details.append(output.detail)
        self.error = output.error


@dataclass(frozen=True, slots=True)
class Running:
    """Request in the engine and what it has generated."""

    generation: Generation
    choice: Choice
    predicted: Predicted | None


class LocalEngine:
    """Engine, tokenizer and forecasts of a model in this process.

    Args:
        model: Hugging Face folder, hub id, or "tally", the built-in model.
        progress: Whether to show progress bars on stderr; None shows them if stderr is a terminal.
        settings: Fields of `EngineConfig` and `ForecastConfig`.

    Attributes:
        default_params: Parameters of prompts without their own, from the model's generation_config.json.

    Raises:
        ModelError: As `assemble`.
        ConfigError: As `assemble`.
    """

    def __init__(self, model: str = "tally", *, progress: bool | None = None, **settings: Any) -> None:
        self._console = Console(stderr=True, quiet=not (sys.stderr.isatty() if progress is None else progress))
        given = {name: settings.pop(name) for name in settings_of(ForecastConfig) if name in settings}
        config = EngineConfig(model=model, **settings)
        forecasts = chosen_forecasts(ForecastConfig(**given), config)
        config = replace(config, learned_dir=state_folder(forecasts))
        # Load the tokenizer first, because it fails fast.
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
            self._forecasts: ForecastKeeper | None = None
            if forecasts is not None:
                self._forecasts = open_keeper(
                    forecasts, model=info.model, folder=info.folder, text_of=self.tokenizer.decode
                )
        except BaseException:
            self.engine.executor.close()
            raise
        self._loop = EngineLoop(self.engine)
        self._grammars = self.engine.executor.grammars or Grammars(
            lambda: self.tokenizer, info.vocab_size, info.eos_token_ids
        )
        self._conversations = Conversations(self.tokenizer)
        self._next_id = 0
        self._is_closed = False

    def close(self) -> None:
        """Stop the engine and save the learned output lengths. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._forecasts is not None:
            self._forecasts.close()
        self.tokenizer.close()
        self._loop.close()

    def _start(
        self,
        request_id: int,
        prompt: list[int],
        text: str | None,
        params: SamplingParams,
        options: RequestOptions,
        *,
        kept: frozenset[int] = frozenset(),
    ) -> Running:
        given = params.resolved(max(1, self.engine.info.max_model_len - len(prompt)))
        self._loop.add(request_id, prompt, given, options=options)
        rules = TextRules(stop=given.stop, kept=kept, min_tokens=given.min_tokens)
        choice = Choice(0, prompt, text, self.tokenizer, rules)
        return Running(Generation(text, prompt), choice, self._forecast(request_id, prompt, given))

    def _compile(self, each: Iterable[SamplingParams]) -> None:
        """Compile the constraints of parameters, or raise `ParameterError`."""
        try:
            for asked in {params.structured_outputs for params in each}:
                if asked is not None:
                    self._grammars.matcher(asked)
        except GrammarError as error:
            raise ParameterError("structured_outputs", f"structured_outputs {error}") from None

    def _forecast(self, request_id: int, prompt: list[int], params: SamplingParams) -> Predicted | None:
        if self._forecasts is None:
            return None
        predicted = self._forecasts.forecast(prompt, params.output_limit)
        self._loop.reforecast(request_id, predicted.forecast)
        return predicted

    def _learn(self, one: Running, reason: FinishReason) -> None:
        tokens = len(one.generation.token_ids)
        if self._forecasts is not None and one.predicted is not None and tokens:
            self._forecasts.learn(one.predicted, tokens, exact=is_exact(reason))
            self._forecasts.save_if_due()

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console, transient=True, disable=self._console.quiet)


class LLM(LocalEngine):
    """Model that is ready to generate. Use it as a context manager, or call `close`; arguments as `LocalEngine`."""

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        structured_outputs: Constraint = None,
    ) -> list[Generation]:
        """Complete one or many prompts, each a text or its token ids, and return results in the same order.

        Args:
            params: One for all prompts, or one per prompt; None means `default_params`.
            service: "best-effort" prompts use spare capacity only, and accept no TTFT or TPOT objective.
            priority: Lower values run earlier.
            target: Soft objectives of each prompt, in seconds above 0.
            cache_salt: One for all prompts, or one per prompt, of 1 to 256 characters. Prompts share cached KV only
                with prompts of the same salt; None shares it with prompts without a salt.
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
        return self._run(ids, texts, each, options_of(service, priority, target), cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        service: str = ServiceClass.REAL_TIME,
        priority: int = 0,
        target: Target = NO_TARGET,
        cache_salt: Salts = None,
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
        use = ToolUse.of(tools, tool_choice, is_parallel=parallel_tool_calls)
        prompts = [self._conversations.prompt(conversation, use) for conversation in conversations_of(messages)]
        given = self._each(params, len(prompts), structured_outputs)
        each = [
            self._conversations.constrained(one, prompt.text, use) for one, prompt in zip(given, prompts, strict=True)
        ]
        self._compile(each)
        found = self._run(
            [prompt.ids for prompt in prompts],
            [None] * len(prompts),
            each,
            options_of(service, priority, target),
            cache_salt,
            kept=self._conversations.kept(use),
        )
        for generation, prompt in zip(found, prompts, strict=True):
            reader = self._conversations.reader(prompt.text, use)
            reader.read(generation.text, is_last=True)
            generation.message, generation.finish_reason = reader.finish(generation.finish_reason)
        return found

    @located_errors()
    def _run(
        self,
        ids: list[list[int]],
        texts: Sequence[str | None],
        each: Sequence[SamplingParams],
        options: RequestOptions,
        cache_salt: Salts,
        *,
        kept: frozenset[int] = frozenset(),
    ) -> list[Generation]:
        salted = [replace(options, cache_salt=salt) for salt in _salts(cache_salt, len(ids))]
        running: dict[int, Running] = {}
        try:
            for prompt, text, given, asked in zip(ids, texts, each, salted, strict=True):
                running[self._next_id] = self._start(self._next_id, prompt, text, given, asked, kept=kept)
                self._next_id += 1
            results = [one.generation for one in running.values()]
            # A stop string finishes a request between two steps, so the next step must not be submitted yet.
            ahead = not any(one.stop for one in each)
            with self._progress() as bars:
                self._drain(running, bars, bars.add_task("generating", total=len(ids)), ahead=ahead)
        finally:
            # After a refused prompt or an interrupt, the other requests must not keep running.
            for request_id, unfinished in running.items():
                self._loop.abort(request_id)
                self._learn(unfinished, FinishReason.ABORT)
        return results

    def _each(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int, constraint: Constraint
    ) -> list[SamplingParams]:
        """Return the parameters of each prompt."""
        if self._is_closed:
            raise RuntimeError("this LLM is closed: make another one to generate")
        each = _per_prompt(self.default_params if given is None else given, count)
        try:
            if constraint is not None:
                one = constraint if isinstance(constraint, StructuredOutput) else StructuredOutput.of(constraint)
                each = [replace(params, structured_outputs=one) for params in each]
        except GrammarError as error:
            raise ParameterError("structured_outputs", f"structured_outputs {error}") from None
        return list(each)

    def _drain(self, running: dict[int, Running], bars: Progress, task: TaskID, *, ahead: bool) -> None:
        """Run the loop until all requests have finished; `ahead` submits the next step before detokenizing."""
        cached: dict[int, int] = {}
        while running:
            events = self._loop.step()
            if ahead:
                self._loop.submit()
            for event in events:
                if isinstance(event, Admitted):
                    cached.setdefault(event.request.id, event.cached)
            for request_id, output in outputs_of(events).items():
                if request_id not in running:
                    continue
                one = running[request_id]
                one.generation.add(output, one.choice.take(output))
                if one.choice.finish_reason is not None:
                    one.generation.finish_reason = one.choice.finish_reason
                    one.generation.cached_tokens = cached.get(request_id, 0)
                    # The engine does not know stop strings and would continue to generate.
                    self._loop.abort(request_id, FinishReason.STOP)
                    self._learn(one, output.reason or FinishReason.STOP)
                    del running[request_id]
                    bars.advance(task)


def options_of(service: str, priority: int, target: Target) -> RequestOptions:
    """Return checked options of a request."""
    if service not in tuple(ServiceClass):
        raise ParameterError("service", f"service must be one of {', '.join(ServiceClass)}, got {service!r}")
    for name, seconds in target._asdict().items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ParameterError(f"target.{name}", f"target.{name} must be a number above 0, got {seconds!r}")
        if service == ServiceClass.BEST_EFFORT and name != "jct_s" and seconds < inf:
            raise ParameterError(f"target.{name}", f"target.{name} must not be set with service {service}")
    return RequestOptions(service=ServiceClass(service), priority=priority, target=target)


def _salts(given: Salts, count: int) -> list[str]:
    salts = [given] * count if given is None or isinstance(given, str) else given
    if not isinstance(salts, list | tuple):
        raise ParameterError(
            "cache_salt", f"cache_salt must be a text, or one of them or None per prompt, got {shown(given)}"
        )
    if len(salts) != count:
        raise ParameterError("cache_salt", f"cache_salt must be one, or one per prompt ({count}), got {len(salts)}")
    return [salt_of(one) for one in salts]


def salt_of(given: Any) -> str:
    """Return a checked salt, empty for None."""
    if given is None:
        return ""
    if not isinstance(given, str):
        raise ParameterError("cache_salt", f"cache_salt must be a text or None, got {shown(given)}")
    if not 1 <= len(given) <= MAX_SALT:
        raise ParameterError("cache_salt", f"cache_salt must have 1 to {MAX_SALT} characters, got {len(given)}")
    if any("\ud800" <= character <= "\udfff" for character in given):
        raise ParameterError("cache_salt", "cache_salt must be Unicode text, and half a surrogate pair is none")
    return given


def outputs_of(events: Iterable[Event]) -> dict[int, Output]:
    """Return the output of each request that has one, by id."""
    outputs: dict[int, Output] = {}
    for event in events:
        if isinstance(event, Token):
            detail = event.detail if isinstance(event.detail, TokenDetail) else None
            outputs[event.request.id] = Output(token=event.token, detail=detail)
        elif isinstance(event, Finished):
            before = outputs.get(event.request.id, Output())
            outputs[event.request.id] = before._replace(reason=event.reason, error=event.detail)
    return outputs


def prompts_of(prompts: Any) -> list[str | list[int]]:
    """Return one or many prompts as a list."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    if items and isinstance(items[0], Integral):
        return [_token_ids(items)]
    return [item if isinstance(item, str) else _token_ids(_items(item)) for item in items]


def _items(given: Any) -> list[Any]:
    # A mapping is iterable, but its keys are not prompts.
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise ParameterError(
            "prompts",
            f"prompts must be a text, token ids, or a list of such prompts, got {shown(given)}",
        )
    return list(given)


def _token_ids(items: list[Any]) -> list[int]:
    for item in items:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise ParameterError("prompts", f"prompts: token ids must be integers, got {item!r}")
    return [int(item) for item in items]


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
