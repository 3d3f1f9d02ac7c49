"""EconoServe figure 12c: 2,000 GPUs for prompts and 2,000 for decodes, and how many serve as much without a split.

    python benchmarks/papers/econoserve/figure12/large.py [--replicas 4000] [--part 40] [--jobs 2]

Llama-3-8B on one A100-80GB for each replica, ShareGPT, two requests per second for each, as `skipjoin simulate`
commands. The split runs with all replicas. The fewest replicas that reach 0.99 of its goodput are searched at one
`part` of the rate and the replicas, beside the split of that size: about 7 minutes on two cores in all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from machine import describe_machine

HERE = Path(__file__).parent
COMMON = "--model llama-3-8b --hardware a100-80gb --block-size 32 --lengths sharegpt --duration 20 --slo-jct-scale 2"
RATE_RPS = 2.0  # of a replica
ENOUGH = 0.99


def simulate(options: str) -> dict[str, Any]:
    """Run the command; its seconds and its records."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records.json"
        command = [str(Path(sys.executable).parent / "skipjoin"), "simulate", *options.split(), "--out", str(out)]
        begun = time.perf_counter()
        subprocess.run(command, check=True)
        return {"seconds": round(time.perf_counter() - begun, 1), "records": json.loads(out.read_text())}


def split(replicas: int, jobs: int) -> dict[str, Any]:
    """A split into halves."""
    options = (
        f"{COMMON} --recipes fcfs --rates {RATE_RPS * replicas:g} --replicas {replicas} "
        f"--prefill-replicas {replicas // 2} --network-gbps 100 --jobs {jobs}"
    )
    done = simulate(options)
    (record,) = done["records"]
    return {
        "command": f"skipjoin simulate {options}",
        "seconds": done["seconds"],
        "requests": record["requests"],
        "goodput_rps": record["slo"]["goodput_rps"],
        "attainment": record["slo"]["jct_attained"],
        "transfer": record["transfer"],
    }


def fewest(recipe: str, replicas: int, goodput_rps: float, jobs: int) -> dict[str, Any]:
    """The fewest whole replicas that reach that goodput at the rate of `replicas`."""
    options = (
        f"{COMMON} --recipes {recipe} --predictor noise:0.23 --rates {RATE_RPS * replicas:g} "
        f"--replicas {replicas // 4} --find-min-replicas slo.goodput_rps>={goodput_rps:.6g} --jobs {jobs}"
    )
    done = simulate(options)
    reach = [one for one in done["records"] if one["slo"]["goodput_rps"] >= goodput_rps]
    least = min(one["settings"]["replicas"] for one in reach)
    return {"command": f"skipjoin simulate {options}", "seconds": done["seconds"], "replicas": least}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4000)
    parser.add_argument("--part", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    small = args.replicas // args.part
    part = split(small, args.jobs)
    goodput = ENOUGH * part["goodput_rps"]
    record = {
        "machine": describe_machine(),
        "split": split(args.replicas, args.jobs),
        "part": {
            "split": part,
            "replicas": small,
            "fewest": {recipe: fewest(recipe, small, goodput, args.jobs) for recipe in ("fcfs", "econoserve")},
        },
    }
    (HERE / "large.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
