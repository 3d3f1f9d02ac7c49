"""Generation in this process: the engine without a server around it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from skipjoin.config import EngineConfig, ForecastConfig
from skipjoin.core.events import Event, Finished, Token
from skipjoin.core.request import NO_TARGET, FinishReason, RequestOptions, Target
from skipjoin.engine.build import Engine, assemble
from skipjoin.engine.forecasting import Predicted, chosen_forecasts, is_exact, open_keeper
from skipjoin.engine.load import model_folder
from skipjoin.engine.loop import EngineLoop
from skipjoin.engine.text import Choice, Output, TextRules
from skipjoin.knobs import settings_of
from skipjoin.model.tokenizer import Tokenizer, load_tokenizer
from skipjoin.sampling import ParameterError, SamplingParams, TokenDetail

Message = Mapping[str, Any]


@dataclass(slots=True)
class Generation:
    """The outcome of one prompt.

    text, token_ids: the output. finish_reason: "stop", "length", or "error" where the engine gave the request up;
    error: what happened then, and what helps. details: per token, if log-probabilities were asked for; the first one
    also has those of the prompt.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    details: list[TokenDetail] = field(default_factory=list)
    error: str = ""

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
    and `ForecastConfig`. progress: whether progress bars are shown on stderr; None: if it is a terminal.
    Raises `ModelError` and `ConfigError` as `assemble` does.
    """

    def __init__(self, model: str = "tally", *, progress: bool | None = None, **settings: Any) -> None:
        self._console = Console(stderr=True, quiet=not (sys.stderr.isatty() if progress is None else progress))
        given = {name: settings.pop(name) for name in settings_of(ForecastConfig) if name in settings}
        config = EngineConfig(model=model, **settings)
        forecasts = chosen_forecasts(ForecastConfig(**given), config)
        # The tokenizer first: it fails fast.
        self.tokenizer: Tokenizer = load_tokenizer(model_folder(model, config.load_format))
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

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine, and save what was learnt of output lengths. Generation afterwards is an error."""
        if self._forecasts is not None:
            self._forecasts.close()
        self._loop.close()

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        target: Target = NO_TARGET,
    ) -> list[Generation]:
        """Complete one prompt or many, each a text or its token ids; results are in the order of the prompts.

        params: one for all prompts, or one for each. priority: lower is earlier. target: soft objectives of each
        prompt, in seconds above 0.

        Raises `ParameterError`, before anything runs, for a prompt, parameter or objective outside its bounds.
        """
        ids = [self.tokenizer.encode(item) if isinstance(item, str) else list(item) for item in _as_list(prompts)]
        texts = [item if isinstance(item, str) else None for item in _as_list(prompts)]
        return self._run(ids, texts, params, _options(priority, target))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        target: Target = NO_TARGET,
    ) -> list[Generation]:
        """Answer one conversation or many through the model's chat template. See `generate`."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        ids = [self.tokenizer.chat(conversation) for conversation in conversations]
        return self._run(ids, [None] * len(ids), params, _options(priority, target))

    def _run(
        self,
        ids: list[list[int]],
        texts: Sequence[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions,
    ) -> list[Generation]:
        each = _per_prompt(params, len(ids))
        running: dict[int, _Running] = {}
        try:
            for prompt, text, one in zip(ids, texts, each, strict=True):
                self._loop.add(self._next_id, prompt, one, options=options)
                rules = TextRules(stop=one.stop, min_tokens=one.min_tokens)
                choice = Choice(0, prompt, text, self.tokenizer, rules)
                predicted = self._forecast(self._next_id, prompt, one)
                running[self._next_id] = _Running(Generation(text, prompt), choice, predicted)
                self._next_id += 1
            results = [one.generation for one in running.values()]
            with self._progress() as bars:
                self._drain(running, bars, bars.add_task("generating", total=len(ids)))
        finally:
            # A refused prompt or an interrupt must not leave the others running.
            for request_id, one in running.items():
                self._loop.abort(request_id)
                self._learn(one, FinishReason.ABORT)
        return results

    def _drain(self, running: dict[int, _Running], bars: Progress, task: TaskID) -> None:
        """Run the loop until all requests have ended."""
        while running:
            for request_id, output in _outputs(self._loop.step()).items():
                if request_id not in running:
                    continue
                one = running[request_id]
                one.generation.add(output, one.choice.take(output))
                if one.choice.finish_reason is not None:
                    one.generation.finish_reason = one.choice.finish_reason
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


def _options(priority: int, target: Target) -> RequestOptions:
    """Raises `ParameterError` for an objective that is no time."""
    for name, seconds in target._asdict().items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ParameterError(f"target.{name}", f"target.{name} must be a number above 0, got {seconds!r}")
    return RequestOptions(priority=priority, target=target)


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


def _as_list(prompts: Any) -> list[Any]:
    """A list of prompts, from one or many."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _per_prompt(params: SamplingParams | Iterable[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params)
    if len(each) != count:
        raise ValueError(f"params must be one, or one per prompt ({count}), got {len(each)}")
    return each
