"""The command line. Flags have the names that vLLM's users know."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from skipjoin import __version__
from skipjoin.config import ConfigError, EngineConfig, ServerConfig
from skipjoin.model.config import ModelError
from skipjoin.recipes import RECIPES
from skipjoin.sampling import ParameterError, SamplingParams

# Commands import what they run: `skipjoin --help` and the API process do without torch.

app = typer.Typer(
    help="LLM serving whose scheduler can stop any request after any token and run another.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(help="A Hugging Face folder, a hub id, or 'tally', the built-in model.")]
Recipe = Annotated[
    str, typer.Option("--recipe", "--scheduling-policy", help=f"Scheduler: {', '.join(sorted(RECIPES))}.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Attention = Annotated[str, typer.Option(help="Attention back end: auto, torch or cpp.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and output [default: the model's].")]
MaxNumSeqs = Annotated[int, typer.Option(help="Most requests in a step.")]
MaxBatchedTokens = Annotated[int, typer.Option("--max-num-batched-tokens", help="Most tokens in a step.")]
BlockSize = Annotated[int, typer.Option(help="Tokens per KV block.")]
KvCacheGib = Annotated[float | None, typer.Option(help="Size of the KV pool in GiB [default: a share of free memory].")]
GpuShare = Annotated[float, typer.Option("--gpu-memory-utilization", help="Share of GPU memory to use.")]
Starvation = Annotated[
    float, typer.Option("--starvation-s", help="fastserve: seconds without running before a promotion.")
]
Depth = Annotated[
    int, typer.Option("--pipeline-depth", help="Plans in flight; 2 decides the next step while one runs.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads of the model [default: all].")]
Seed = Annotated[int, typer.Option(help="From which requests without a seed draw theirs.")]

_ENGINE = EngineConfig()
_SERVER = ServerConfig()
_BAD_INPUT = 2


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Bad input is one line on stderr and exit code 2, not a traceback."""
    try:
        yield
    except (ConfigError, ModelError, ParameterError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(_BAD_INPUT) from error


@app.command()
def serve(
    model: Model = _ENGINE.model,
    *,
    recipe: Recipe = _ENGINE.recipe,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _SERVER.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = _SERVER.port,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="SKIPJOIN_API_KEY", help="Key that clients must send; may be given several times."),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="File with a chat template to use instead.")] = None,
    dtype: Dtype = _ENGINE.dtype,
    device: Device = _ENGINE.device,
    attention: Attention = _ENGINE.attention,
    max_model_len: MaxModelLen = _ENGINE.max_model_len,
    max_num_seqs: MaxNumSeqs = _ENGINE.max_num_seqs,
    max_num_batched_tokens: MaxBatchedTokens = _ENGINE.max_num_batched_tokens,
    block_size: BlockSize = _ENGINE.block_size,
    kv_cache_gib: KvCacheGib = _ENGINE.kv_cache_gib,
    gpu_memory_utilization: GpuShare = _ENGINE.gpu_memory_utilization,
    starvation_s: Starvation = _ENGINE.starvation_s,
    pipeline_depth: Depth = _ENGINE.pipeline_depth,
    threads: Threads = _ENGINE.threads,
    seed: Seed = _ENGINE.seed,
    max_num_queued_reqs: Annotated[
        int, typer.Option(help="Most requests in the server, waiting and running.")
    ] = _SERVER.max_queued_requests,
    max_num_queued_tokens: Annotated[
        int, typer.Option(help="Most prompt tokens in the server.")
    ] = _SERVER.max_queued_tokens,
    default_deadline_s: Annotated[
        float | None, typer.Option(help="Seconds until a request without a deadline is given up.")
    ] = _SERVER.default_deadline_s,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.")
    ] = _SERVER.shutdown_timeout_s,
) -> None:
    """Serve MODEL over the OpenAI API."""
    from skipjoin.server.launch import run_server  # noqa: PLC0415

    with _plain_errors():
        engine = EngineConfig(
            model=model,
            dtype=dtype,
            device=device,
            attention=attention,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            recipe=recipe,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            starvation_s=starvation_s,
            pipeline_depth=pipeline_depth,
            threads=threads,
            seed=seed,
        )
        server = ServerConfig(
            host=host,
            port=port,
            api_keys=tuple(api_key or ()),
            served_model_name=served_model_name,
            chat_template=chat_template,
            max_queued_requests=max_num_queued_reqs,
            max_queued_tokens=max_num_queued_tokens,
            default_deadline_s=default_deadline_s,
            shutdown_timeout_s=shutdown_timeout,
        )
        raise typer.Exit(run_server(engine, server))


@app.command()
def generate(
    model: Model = _ENGINE.model,
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
    recipe: Recipe = _ENGINE.recipe,
    dtype: Dtype = _ENGINE.dtype,
    device: Device = _ENGINE.device,
    attention: Attention = _ENGINE.attention,
    max_model_len: MaxModelLen = _ENGINE.max_model_len,
    max_num_seqs: MaxNumSeqs = _ENGINE.max_num_seqs,
    kv_cache_gib: KvCacheGib = _ENGINE.kv_cache_gib,
    threads: Threads = _ENGINE.threads,
    seed: Seed = _ENGINE.seed,
) -> None:
    """Generate from prompts in this process, without a server."""
    from skipjoin.llm import LLM  # noqa: PLC0415

    with _plain_errors():
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
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_gib=kv_cache_gib,
            threads=threads,
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
            print(json.dumps(record, ensure_ascii=False))
        else:
            print(result.text)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Folder whose weights are .bin files.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
) -> None:
    """Make a safetensors copy of a model folder that has only .bin weights.

    This is the one command that reads pickled files, and it reads tensors only. Serving never does.
    """
    from rich.progress import Progress  # noqa: PLC0415

    from skipjoin.model.convert import convert_folder  # noqa: PLC0415

    with _plain_errors(), Progress(transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("converting", total=None)
        convert_folder(source, target, lambda done, total: bars.update(task, completed=done, total=total))
    print(f"wrote {target}")


def _print_version(value: bool) -> None:
    if value:
        print(f"skipjoin {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
