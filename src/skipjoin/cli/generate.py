"""`skipjoin generate`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from skipjoin.cli.options import (
    ENGINE,
    Attention,
    Device,
    Dtype,
    KvCacheGib,
    LoadFormat,
    MaxModelLen,
    MaxNumSeqs,
    Model,
    Objective,
    Oracle,
    Profile,
    Recipe,
    Seed,
    SwapSpace,
    Threads,
    check_profile_file,
    plain_errors,
)
from skipjoin.sampling import SamplingParams


def generate(
    model: Model = ENGINE.model,
    *,
    prompt: Annotated[list[str], typer.Option(help="Text to complete; may be given several times.")],
    chat: Annotated[bool, typer.Option(help="Put each prompt to the model as a user's message.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this total.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among this many tokens; 0: all.")] = 0,
    sampling_seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; may be given several times.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after end-of-sequence.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
    recipe: Recipe = ENGINE.recipe,
    dtype: Dtype = ENGINE.dtype,
    device: Device = ENGINE.device,
    attention: Attention = ENGINE.attention,
    load_format: LoadFormat = ENGINE.load_format,
    max_model_len: MaxModelLen = ENGINE.max_model_len,
    max_num_seqs: MaxNumSeqs = ENGINE.max_num_seqs,
    kv_cache_gib: KvCacheGib = ENGINE.kv_cache_gib,
    swap_space_gib: SwapSpace = ENGINE.swap_space_gib,
    slo_s: Objective = ENGINE.slo_s,
    oracle: Oracle = ENGINE.oracle,
    threads: Threads = ENGINE.threads,
    profile: Profile = ENGINE.profile,
    seed: Seed = ENGINE.seed,
) -> None:
    """Generate from prompts in this process, without a server."""
    from skipjoin.llm import LLM  # noqa: PLC0415

    with plain_errors():
        check_profile_file(profile)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=sampling_seed,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
        )
        with LLM(
            model,
            recipe=recipe,
            dtype=dtype,
            device=device,
            attention=attention,
            load_format=load_format,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_gib=kv_cache_gib,
            swap_space_gib=swap_space_gib,
            slo_s=slo_s,
            oracle=oracle,
            threads=threads,
            profile=profile,
            seed=seed,
        ) as llm:
            if chat:
                results = llm.chat([[{"role": "user", "content": text}] for text in prompt], params)
            else:
                results = llm.generate(prompt, params)
    for result in results:
        if as_json:
            record = {
                "text": result.text,
                "token_ids": result.token_ids,
                "prompt_tokens": len(result.prompt_token_ids),
                "finish_reason": result.finish_reason,
            }
            if result.error:
                record["error"] = result.error
            print(json.dumps(record, ensure_ascii=False))
        else:
            print(result.text)
            if result.error:
                print(f"error: {result.error}", file=sys.stderr)
    if any(result.error for result in results):
        raise typer.Exit(1)
