"""`skipjoin serve`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from skipjoin.cli.options import (
    ENGINE,
    SERVER,
    Attention,
    Backend,
    BlockSize,
    Depth,
    Device,
    Dtype,
    EnforceEager,
    GpuShare,
    KvCacheGib,
    LoadFormat,
    MaxBatchedTokens,
    MaxModelLen,
    MaxNumSeqs,
    MaxRestarts,
    Model,
    Objective,
    Oracle,
    PipelineParallel,
    Profile,
    Quantum,
    RayAddress,
    Recipe,
    Seed,
    Starvation,
    StarvationBound,
    SwapSpace,
    TensorParallel,
    Threads,
    check_profile_file,
    plain_errors,
)
from skipjoin.config import METRICS_COMPAT, ConfigError, EngineConfig, ServerConfig

if TYPE_CHECKING:
    from skipjoin.server.launch import MakeEngines


def serve(
    model: Model = ENGINE.model,
    *,
    recipe: Recipe = ENGINE.recipe,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = SERVER.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = SERVER.port,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="SKIPJOIN_API_KEY", help="Key that clients must send; may be given several times."),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="File with a chat template to use instead.")] = None,
    dtype: Dtype = ENGINE.dtype,
    device: Device = ENGINE.device,
    attention: Attention = ENGINE.attention,
    load_format: LoadFormat = ENGINE.load_format,
    max_model_len: MaxModelLen = ENGINE.max_model_len,
    max_num_seqs: MaxNumSeqs = ENGINE.max_num_seqs,
    max_num_batched_tokens: MaxBatchedTokens = ENGINE.max_num_batched_tokens,
    block_size: BlockSize = ENGINE.block_size,
    kv_cache_gib: KvCacheGib = ENGINE.kv_cache_gib,
    gpu_memory_utilization: GpuShare = ENGINE.gpu_memory_utilization,
    swap_space_gib: SwapSpace = ENGINE.swap_space_gib,
    slo_s: Objective = ENGINE.slo_s,
    oracle: Oracle = ENGINE.oracle,
    quantum_s: Quantum = ENGINE.quantum_s,
    starvation_s: Starvation = ENGINE.starvation_s,
    starvation_bound_s: StarvationBound = ENGINE.starvation_bound_s,
    pipeline_depth: Depth = ENGINE.pipeline_depth,
    enforce_eager: EnforceEager = ENGINE.enforce_eager,
    tensor_parallel_size: TensorParallel = ENGINE.tensor_parallel_size,
    pipeline_parallel_size: PipelineParallel = ENGINE.pipeline_parallel_size,
    distributed_executor_backend: Backend = ENGINE.distributed_executor_backend,
    ray_address: RayAddress = ENGINE.ray_address,
    max_restarts: MaxRestarts = ENGINE.max_restarts,
    threads: Threads = ENGINE.threads,
    profile: Profile = ENGINE.profile,
    seed: Seed = ENGINE.seed,
    max_num_queued_reqs: Annotated[
        int, typer.Option(help="Most requests in the server, waiting and running.")
    ] = SERVER.max_queued_requests,
    max_num_queued_tokens: Annotated[
        int, typer.Option(help="Most prompt tokens in the server.")
    ] = SERVER.max_queued_tokens,
    default_deadline_s: Annotated[
        float | None, typer.Option(help="Seconds until a request without a deadline is given up.")
    ] = SERVER.default_deadline_s,
    metrics_compat: Annotated[
        str, typer.Option(help=f"Tell metrics under other names, too: {', '.join(METRICS_COMPAT)}.")
    ] = SERVER.metrics_compat,
    timeline: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto and chrome://tracing.")
    ] = ENGINE.timeline,
    replicas: Annotated[
        int,
        typer.Option(help="Engines behind this server, by Ray Serve; each has the model, and the KV pool, of its own."),
    ] = SERVER.replicas,
    enable_debug_routes: Annotated[
        bool, typer.Option("--enable-debug-routes", help="Serve GET /debug/requests: the state of every live request.")
    ] = SERVER.enable_debug_routes,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.")
    ] = SERVER.shutdown_timeout_s,
) -> None:
    """Serve MODEL over the OpenAI API."""
    from skipjoin.server.engines.replicas import ReplicaSet  # noqa: PLC0415
    from skipjoin.server.launch import one_engine, run_server  # noqa: PLC0415

    with plain_errors():
        check_profile_file(profile)
        engine = EngineConfig(
            model=model,
            dtype=dtype,
            device=device,
            attention=attention,
            load_format=load_format,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            swap_space_gib=swap_space_gib,
            recipe=recipe,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            slo_s=slo_s,
            oracle=oracle,
            quantum_s=quantum_s,
            starvation_s=starvation_s,
            starvation_bound_s=starvation_bound_s,
            pipeline_depth=pipeline_depth,
            enforce_eager=enforce_eager,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            distributed_executor_backend=distributed_executor_backend,
            # Replicas are placed by it, and an engine's ranks where its replica is.
            ray_address=ray_address if replicas == 1 else None,
            max_restarts=max_restarts,
            threads=threads,
            profile=profile,
            seed=seed,
            timeline=timeline,
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
            metrics_compat=metrics_compat,
            replicas=replicas,
            enable_debug_routes=enable_debug_routes,
        )
        make_engines: MakeEngines = one_engine
        if replicas > 1:
            if timeline is not None:
                raise ConfigError(f"timeline is written by one engine: replicas must be 1 with it, got {replicas}")
            make_engines = partial(ReplicaSet, address=ray_address)
        raise typer.Exit(run_server(engine, server, make_engines=make_engines))
