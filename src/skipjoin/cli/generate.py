"""`skipjoin generate`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from skipjoin.cli.options import Section, Values, engine_values, takes
from skipjoin.config import EngineConfig
from skipjoin.sampling import SamplingParams

if TYPE_CHECKING:
    from skipjoin.llm import Generation


_GROUP = "Generation"


@takes(engine=Section(EngineConfig, finish=engine_values))
def generate(
    *,
    prompt: Annotated[
        list[str],
        typer.Option("--prompt", help="Text to complete; may be given several times.", rich_help_panel=_GROUP),
    ],
    chat: Annotated[
        bool, typer.Option(help="Put each prompt to the model as a user's message.", rich_help_panel=_GROUP)
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_GROUP)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_GROUP)] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the likeliest tokens of this total.", rich_help_panel=_GROUP)
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among this many tokens; 0: all.", rich_help_panel=_GROUP)] = 0,
    sampling_seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.", rich_help_panel=_GROUP)] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends the output; may be given several times.", rich_help_panel=_GROUP),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after end-of-sequence.", rich_help_panel=_GROUP)] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt.", rich_help_panel=_GROUP)
    ] = False,
    engine: Values,
) -> None:
    """Generate from prompts in this process, without a server."""
    from skipjoin.llm import LLM  # noqa: PLC0415

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=sampling_seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    with LLM(**engine) as llm:
        if chat:
            results = llm.chat([[{"role": "user", "content": text}] for text in prompt], params)
        else:
            results = llm.generate(prompt, params)
    for result in results:
        _print(result, as_json=as_json)
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
