"""Measure servers that share this machine's cores, of this source and of another commit in turns, and one at rest.

    python benchmarks/performance/model_step/shared.py --against COMMIT [--servers 2] [--repeats 6] [--rest 60]
        [--sets even,one] [--out FILE]

Every server has as many threads as the machine has cores, and its own API process. In a turn, the servers of one source
run the same set of engine_throughput at once, while those of the other source wait for requests.

- `tokens_per_s`: all servers of a source together; `cpu_ms_per_token`: processor time of their processes.
- `ratio`: rate of this source over the other one, median and quartiles over turns.
- `rest`: share of one core that a server of this source uses over `--rest` seconds without requests.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine_throughput"))
from peers import LIMITS, OverHttp

import harness
from random_model import scratch_model
from servers import Server, free_port
from workload import SETS, WARM_UP, WorkloadSet


class Neighbors:
    """Servers of one source, which run at once."""

    def __init__(self, stack: ExitStack, source: Path, model: Path, count: int) -> None:
        self.http: list[OverHttp] = []
        for _ in range(count):
            port = free_port()
            command = [
                harness.SKIPJOIN,
                "serve",
                model,
                "--port",
                port,
                "--batch-dir",
                "none",
                "--profile",
                "off",
                *LIMITS,
            ]
            self.http.append(OverHttp(stack.enter_context(Server(command, port, {"PYTHONPATH": str(source)}))))

    def run(self, work: WorkloadSet, turn: int) -> tuple[float, float]:
        """Return output tokens per second and processor milliseconds per token."""
        before, begin = self.cpu_seconds(), time.perf_counter()
        with ThreadPoolExecutor(len(self.http)) as clients:
            list(clients.map(lambda one: one.run(work.jobs(turn)), self.http))
        seconds, tokens = time.perf_counter() - begin, work.tokens * len(self.http)
        return tokens / seconds, 1e3 * (self.cpu_seconds() - before) / tokens

    def cpu_seconds(self) -> float:
        """Return the processor time so far of all processes of the servers."""
        roots = [psutil.Process(one.server.process.pid) for one in self.http]
        times = [one.cpu_times() for root in roots for one in (root, *root.children(recursive=True))]
        return sum(each.user + each.system for each in times)


def measure(sides: dict[str, Neighbors], label: str, repeats: int) -> dict[str, Any]:
    """Measure one set."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(repeats):
        for name in harness.in_turn(sides, turn):
            turns[name].append(sides[name].run(SETS[label], turn))
    found: dict[str, Any] = {"set": label}
    for name, each in turns.items():
        rates, cpu = zip(*each, strict=True)
        found[name] = {"tokens_per_s": harness.spread(rates, 1), "cpu_ms_per_token": harness.spread(cpu)}
    pairs = zip(turns["this"], turns["other"], strict=True)
    return found | {"ratio": harness.quartiles([ours[0] / others[0] for ours, others in pairs])}


def main() -> None:
    parser = harness.parser(__doc__, servers=2, repeats=6, rest=60)
    parser.add_argument("--against", required=True, help="another commit of this repository")
    parser.add_argument("--sets", type=harness.some_of("sets", SETS), default=["even", "one"])
    args = parser.parse_args()
    record = harness.new_record(against=args.against, servers=args.servers, results=[])
    with scratch_model(torch.bfloat16) as model, harness.scratch() as folder, ExitStack() as stack:
        sources = {"this": harness.ROOT / "src", "other": harness.source_at(args.against, "src", folder)}
        sides = {name: Neighbors(stack, source, model, args.servers) for name, source in sources.items()}
        for side in sides.values():
            for one in side.http:
                one.run(WARM_UP(-1))
        for label in args.sets:
            record["results"].append(measure(sides, label, args.repeats))
            harness.show(record["results"][-1])
        before = sides["this"].cpu_seconds()
        time.sleep(args.rest)
        spent = (sides["this"].cpu_seconds() - before) / args.servers
        record["rest"] = {"seconds": args.rest, "cores": round(spent / args.rest, 4)}
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
