from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from skipjoin.adapters import configured
from skipjoin.chat import Conversations, Message, ToolUse
from skipjoin.config import TOOL_FORMATS, ConfigError, EngineConfig, ForecastConfig
from skipjoin.core.events import Admitted, Event, Finished, Token
from skipjoin.core.request import FinishReason, RequestOptions
from skipjoin.engine.build import Engine, assemble
from skipjoin.engine.forecasting import ForecastKeeper, Predicted, chosen_forecasts, is_exact, open_keeper, state_folder
from skipjoin.engine.loop import EngineLoop
from skipjoin.engine.text import Choice, Output, TextRules
from skipjoin.formats.message import MessageReader
from skipjoin.model.folder import model_folder
from skipjoin.model.generation_config import sampling_defaults
from skipjoin.model.grammars import Grammars
from skipjoin.model.tokenizer import Tokenizer, load_tokenizer
from skipjoin.options import settings_of
from skipjoin.sampling import ParameterError, SamplingParams, TokenDetail
from skipjoin.structured_output import GrammarError


@dataclass(slots=True)
class Generation:
    """Result of one prompt.

    Attributes:
        finish_reason: "stop", "length", "tool_calls" after `chat` with calls, or "error" if the engine aborted the
            request.
        error: Cause and remedy of an "error"; otherwise empty.
        details: Log-probabilities per generated token, if requested; the first entry also has those of the prompt.
        cached_tokens: Prompt tokens found in the prefix cache when the request was first admitted.
        message: Answer of a conversation in OpenAI's form, with `reasoning_content` and `tool_calls` if there are any.
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

    def admitted(self, event: Admitted) -> None:
        if event.is_first:
            self.cached_tokens = event.cached

    def add(self, output: Output, text: str) -> None:
        self.text += text
        if output.token is not None:
            self.token_ids.append(output.token)
        if output.detail is not None:
            self.details.append(output.detail)
        self.error = output.error


@dataclass(frozen=True, slots=True)
class Running:
    generation: Generation
    choice: Choice
    predicted: Predicted | None


class LocalEngine:
    """Engine, tokenizer and forecasts of a model in this process.

    Args:
        model: Hugging Face folder, GGUF file, hub id, or "tally", the built-in model.
        progress: Whether to show progress bars on stderr; None shows them if stderr is a terminal.
        tool_format: Format of tool calls. "auto" is that of the model's chat template; "json" works with any model.
        settings: Fields of `EngineConfig` and `ForecastConfig`.

    Attributes:
        default_params: Parameters of prompts without their own, from the model's generation_config.json.

    Raises:
        ModelError: The model cannot run.
        ConfigError: A setting is invalid.
    """

    def __init__(
        self, model: str = "tally", *, progress: bool | None = None, tool_format: str = "auto", **settings: Any
    ) -> None:
        if tool_format not in TOOL_FORMATS:
            raise ConfigError(f"tool_format must be one of {', '.join(TOOL_FORMATS)}, got {tool_format!r}")
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
                config, lambda what, share: bars.update(task, description=what, completed=share)
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
        self._adapters = {adapter.name: adapter.number for adapter in configured(config.lora_modules)}
        self._conversations = Conversations(self.tokenizer, tool_format)
        self._next_id = 0
        self._is_closed = False

    def _chat_prompt(
        self, messages: Sequence[Message], use: ToolUse, params: SamplingParams
    ) -> tuple[list[int], SamplingParams]:
        chats = self._conversations
        text = chats.text(messages, use)
        chats.check_calls(use)
        constraint = chats.constraint(params.structured_outputs, text, use)
        return self.tokenizer.encode(text, add_special_tokens=False), replace(params, structured_outputs=constraint)

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
        reader: MessageReader | None = None,
    ) -> Running:
        given = params.resolved(max(1, self.engine.info.max_model_len - len(prompt)))
        self._loop.add(request_id, prompt, given, options=options)
        rules = TextRules(stop=given.stop, kept=kept, min_tokens=given.min_tokens)
        choice = Choice(0, prompt, text, self.tokenizer, rules, reader=reader)
        return Running(Generation(text, prompt), choice, self._forecast(request_id, prompt, given))

    def _compile(self, each: Iterable[SamplingParams]) -> None:
        try:
            for asked in {params.structured_outputs for params in each}:
                if asked is not None:
                    self._grammars.matcher(asked)
        except GrammarError as error:
            raise ParameterError("structured_outputs", f"structured_outputs {error}") from None

    def _forecast(self, request_id: int, prompt: list[int], params: SamplingParams) -> Predicted | None:
        if self._forecasts is None or params.pooling is not None:
            return None
        predicted = self._forecasts.forecast(prompt, params.output_limit)
        self._loop.reforecast(request_id, predicted.forecast)
        return predicted

    def _learn(self, running: Running, reason: FinishReason) -> None:
        tokens = len(running.generation.token_ids)
        if self._forecasts is not None and running.predicted is not None and tokens:
            self._forecasts.learn(running.predicted, tokens, exact=is_exact(reason))
            self._forecasts.save_if_due()

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console, transient=True, disable=self._console.quiet)


def outputs_of(events: Iterable[Event]) -> dict[int, Output]:
    outputs: dict[int, Output] = {}
    for event in events:
        if isinstance(event, Token):
            detail = event.detail if isinstance(event.detail, TokenDetail) else None
            outputs[event.request.id] = Output(token=event.token, detail=detail)
        elif isinstance(event, Finished):
            before = outputs.get(event.request.id, Output())
            outputs[event.request.id] = before._replace(reason=event.reason, error=event.detail)
    return outputs
