"""Time the first product of an MLP with bias and activation, fused and unfused.

    OMP_WAIT_POLICY=passive python benchmarks/performance/model_step/activations.py [--device cpu|cuda]
        [--threads N] [--out FILE]

The product is OPT's: [rows, hidden] times [hidden, 4 hidden], with OPT's ReLU and both forms of GELU. Rows are the
sequences of a decode step or the tokens of a prompt.

- `torch`: torch's product with bias, then torch's activation.
- `fused`: the product that a model runs on this device.
- `apart` (CPU): the compiled product with bias, then torch's activation.
- `epilogue` (CUDA): cuBLASLt's product with bias and activation, where it has the activation.

A call runs the matrices of several layers, so that decodes read their weights from memory; times are per layer. On a
CPU the variants take turns in random order. On CUDA calls are replayed as a graph, as decode steps are.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))
import harness
from skipjoin.model.backends import implementations
from skipjoin.model.ops.base import LayerOps
from skipjoin.model.ops.torch_ops import TorchOps, activated

# Hidden size and number of layers of each model.
MODELS = {"tiny": (64, 2), "opt-125m": (768, 12), "opt-1.3b": (2048, 24), "opt-13b": (5120, 40)}
MEASURED = {"cpu": ("opt-125m", "opt-1.3b"), "cuda": ("opt-1.3b", "opt-13b")}
DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16,)}
ACTIVATIONS = ("relu", "gelu", "gelu_tanh")
ROWS = (1, 4, 16, 64, 512)
# More weights than the caches of a device hold, where the model has that many.
_WEIGHT_BYTES = 256 << 20
# Seconds of a case on a CPU and of a tiny one, and bounds on its rounds.
_SPAN_S, _TINY_SPAN_S, _MIN_ROUNDS, _MAX_ROUNDS = 0.5, 0.02, 5, 200

Calls = dict[str, Callable[[], object]]


@torch.inference_mode()
def measure(device: str, *, tiny: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a record for each type, model, activation and number of rows; `tiny` uses small shapes for a rehearsal."""
    if tiny:
        yield from _records(device, ("tiny",), ROWS[:2], _TINY_SPAN_S)
    else:
        yield from _records(device, MEASURED[device], ROWS, _SPAN_S)


def _records(device: str, models: tuple[str, ...], rows: tuple[int, ...], span_s: float) -> Iterator[dict[str, Any]]:
    for dtype in DTYPES[device]:
        ops = implementations("auto", dtype, torch.device(device))[0]
        for model in models:
            for activation in ACTIVATIONS:
                products = _products(ops, model, activation, dtype, device)
                for count in rows:
                    x = torch.randn(count, MODELS[model][0], device=device).to(dtype)
                    calls = {name: _over_layers(layers, x) for name, layers in products.items()}
                    times = _cuda_times(calls) if device == "cuda" else _cpu_times(calls, span_s)
                    layers = len(products["torch"])
                    yield {
                        "dtype": str(dtype).removeprefix("torch."),
                        "operations": ops.name,
                        "model": model,
                        "activation": activation,
                        "rows": count,
                        "us": {name: _spread(each, layers) for name, each in times.items()},
                    }


def _products(ops: LayerOps, model: str, activation: str, dtype: torch.dtype, device: str) -> dict[str, list[Any]]:
    """Return the functions of the layers for each variant."""
    hidden, layers = MODELS[model]
    layers = max(1, min(layers, _WEIGHT_BYTES // (4 * hidden * hidden * dtype.itemsize)))
    weights = [torch.randn(4 * hidden, hidden, device=device).mul_(0.02).to(dtype) for _ in range(layers)]
    bias = torch.randn(4 * hidden, device=device).to(dtype)
    ways: dict[str, list[Any]] = {
        "torch": [TorchOps().linear(weight, bias, activation) for weight in weights],
        "fused": [ops.linear(weight, bias, activation) for weight in weights],
    }
    if device == "cpu":
        plain = [ops.linear(weight, bias) for weight in weights]
        ways["apart"] = [lambda x, linear=linear: activated(activation, linear(x)) for linear in plain]
    elif activation != "gelu":
        options = {"use_gelu": activation == "gelu_tanh"}
        ways["epilogue"] = [
            lambda x, w=weight: torch._addmm_activation(bias, x, w.t(), **options) for weight in weights
        ]
    return ways


def _over_layers(layers: list[Any], x: torch.Tensor) -> Callable[[], object]:
    def call() -> None:
        for layer in layers:
            layer(x)

    return call


def _cpu_times(calls: Calls, span_s: float) -> dict[str, list[float]]:
    """Return the milliseconds of the calls in `span_s` seconds, without the warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    draw = random.Random(0)
    end = time.perf_counter() + span_s
    for turn in range(1 + _MAX_ROUNDS):
        for name in draw.sample(list(calls), len(calls)):
            times[name].append(harness.seconds_of(calls[name]) * 1e3)
        if turn == 0:
            end = time.perf_counter() + span_s
        elif turn >= _MIN_ROUNDS and time.perf_counter() >= end:
            break
    return {name: found[1:] for name, found in times.items()}


def _cuda_times(calls: Calls) -> dict[str, list[float]]:
    """Return the milliseconds of the calls on CUDA."""
    from triton.testing import do_bench_cudagraph  # noqa: PLC0415

    return {name: do_bench_cudagraph(call, rep=100, return_mode="all") for name, call in calls.items()}


def _spread(times: list[float], layers: int) -> dict[str, float]:
    """Return the microseconds per layer from milliseconds per call."""
    return {
        "median": round(statistics.median(times) / layers * 1e3, 2),
        "min": round(min(times) / layers * 1e3, 2),
        "runs": len(times),
    }


def line(record: dict[str, Any]) -> str:
    """Return a row of the table."""
    label = f"{record['dtype']} {record['operations']} {record['model']} {record['activation']} {record['rows']} rows"
    return f"{label}: " + ", ".join(
        f"{name} {us['median']:.0f} us ({us['min']:.0f})" for name, us in record["us"].items()
    )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the script")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    record = harness.new_record(threads=torch.get_num_threads(), device=arguments.device)
    record["results"] = results = list(measure(arguments.device, tiny=arguments.tiny))
    print("\n".join(map(line, results)))
    harness.write_record(record, arguments.out)


if __name__ == "__main__":
    main()
