"""`skipjoin generate`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from skipjoin.cli.options import Section, Values, engine_values, takes
from skipjoin.config import EngineConfig, ForecastConfig
from skipjoin.knobs import Knob
from skipjoin.sampling import SamplingParams

if TYPE_CHECKING:
    from skipjoin.llm import Generation

_GROUP = "Generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to generate, and how it is printed. The bounds of what concerns sampling are those of `SamplingParams`."""

    prompt: Annotated[tuple[str, ...], Knob("Text to complete; may be repeated.", metavar="TEXT", group=_GROUP)]
    chat: Annotated[
        bool, Knob("Put each prompt to the model as a user's message.", flags=("--chat/--no-chat",), group=_GROUP)
    ] = False
    max_tokens: Annotated[int, Knob("Most tokens to generate.", group=_GROUP)] = 128
    temperature: Annotated[float, Knob("0 is greedy.", group=_GROUP)] = 1.0
    top_p: Annotated[float, Knob("Sample among the likeliest tokens of this total.", group=_GROUP)] = 1.0
    top_k: Annotated[int, Knob("Sample among this many tokens; 0: all.", group=_GROUP)] = 0
    sampling_seed: Annotated[int | None, Knob("Same seed, same tokens.", group=_GROUP)] = None
    stop: Annotated[
        tuple[str, ...], Knob("Text that ends the output; may be repeated.", metavar="TEXT", group=_GROUP)
    ] = ()
    ignore_eos: Annotated[
        bool, Knob("Go on after end-of-sequence.", flags=("--ignore-eos/--no-ignore-eos",), group=_GROUP)
    ] = False
    as_json: Annotated[bool, Knob("Print one JSON object per prompt.", flags=("--json",), group=_GROUP)] = False

    def params(self) -> SamplingParams:
        """How each prompt is completed. Raises `ParameterError`."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.sampling_seed,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )


@takes(task=Section(Task), engine=Section(EngineConfig, finish=engine_values), forecasts=Section(ForecastConfig))
def generate(*, task: Values, engine: Values, forecasts: Values) -> None:
    """Generate from prompts in this process, without a server."""
    from skipjoin.llm import LLM  # noqa: PLC0415

    wanted = Task(**task)
    params = wanted.params()
    with LLM(**engine, **forecasts) as llm:
        if wanted.chat:
            results = llm.chat([[{"role": "user", "content": text}] for text in wanted.prompt], params)
        else:
            results = llm.generate(wanted.prompt, params)
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
