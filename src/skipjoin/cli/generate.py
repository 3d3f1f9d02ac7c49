from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from skipjoin.cli.options import Section, Values, engine_values, takes
from skipjoin.config import EngineConfig, ForecastConfig
from skipjoin.core.request import ServiceClass
from skipjoin.options import Option, check
from skipjoin.sampling import SamplingParams

if TYPE_CHECKING:
    from skipjoin.local_engine import Generation

_GROUP = "Generation"
_task = partial(Option, group=_GROUP, is_common=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    prompt: Annotated[tuple[str, ...], _task("Text to complete; may be repeated.", metavar="TEXT")]
    chat: Annotated[bool, _task("Send each prompt as a user's chat message.", flags=("--chat/--no-chat",))] = False
    max_tokens: Annotated[int, _task("Maximum number of tokens to generate.")] = 128
    temperature: Annotated[float | None, _task("Sampling temperature; 0 is greedy (default: the model's, or 1).")] = (
        None
    )
    top_p: Annotated[
        float | None,
        _task("Sample from the most likely tokens with this total probability (default: the model's, or 1)."),
    ] = None
    top_k: Annotated[
        int | None, _task("Sample from this number of most likely tokens; 0 is unlimited (default: the model's, or 0).")
    ] = None
    sampling_seed: Annotated[int | None, _task("Seed of sampling (default: derived from --seed).")] = None
    stop: Annotated[tuple[str, ...], _task("Text that ends the output; may be repeated.", metavar="TEXT")] = ()
    ignore_eos: Annotated[
        bool, Option("Continue after the end-of-sequence token.", flags=("--ignore-eos/--no-ignore-eos",), group=_GROUP)
    ] = False
    service: Annotated[str, Option("Service class of the prompts", choices=tuple(ServiceClass), group=_GROUP)] = (
        ServiceClass.REAL_TIME.value
    )
    adapter: Annotated[
        str | None, Option("Adapter of --lora-modules by name (default: none).", metavar="NAME", group=_GROUP)
    ] = None
    as_json: Annotated[bool, _task("Print one JSON object per prompt.", flags=("--json",))] = False

    def __post_init__(self) -> None:
        check(self)

    def params(self, defaults: SamplingParams) -> SamplingParams:
        chosen = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        return replace(
            defaults,
            max_tokens=self.max_tokens,
            seed=self.sampling_seed,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            **{name: value for name, value in chosen.items() if value is not None},
        )


@takes(
    asked=Section(Asked),
    engine=Section(EngineConfig, finish=engine_values, from_environment=True),
    forecasts=Section(ForecastConfig, from_environment=True),
)
def generate(*, asked: Values, engine: Values, forecasts: Values) -> None:
    """Generate from prompts in this process, without a server."""
    from skipjoin.model.folder import check_model  # noqa: PLC0415

    check_model(engine["model"], engine["load_format"])  # before torch is imported, which takes seconds
    from skipjoin.llm import LLM  # noqa: PLC0415

    wanted = Asked(**asked)
    wanted.params(SamplingParams())  # reports invalid options before the model is loaded
    with LLM(**engine, **forecasts) as llm:
        params = wanted.params(llm.default_params)
        if wanted.chat:
            chats = [[{"role": "user", "content": text}] for text in wanted.prompt]
            results = llm.chat(chats, params, service=wanted.service, adapter=wanted.adapter)
        else:
            results = llm.generate(wanted.prompt, params, service=wanted.service, adapter=wanted.adapter)
    for result in results:
        _print(result, as_json=wanted.as_json)
    if any(result.error for result in results):
        raise typer.Exit(1)


def _print(result: Generation, *, as_json: bool) -> None:
    if not as_json:
        print(result.text)
        if result.error:
            print(f"error: {result.error}", file=sys.stderr)
        return
    record = {
        "text": result.text,
        "token_ids": result.token_ids,
        "prompt_tokens": len(result.prompt_token_ids),
        "finish_reason": result.finish_reason,
    }
    if result.error:
        record["error"] = result.error
    print(json.dumps(record, ensure_ascii=False))
