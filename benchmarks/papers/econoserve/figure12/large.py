"""EconoServe figure 12c: 2,000 prefill and 2,000 decode GPUs, and the number of GPUs that replace them without a split.

Each replica is Llama-3-8B on one A100-80GB, with two ShareGPT requests per second. The split runs with all replicas. At
a fraction of the size (`--part`) the script measures the split again and searches for the minimum number of whole
replicas that reach 0.99 of its goodput. It takes about 7 minutes on two cores.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
import harness

COMMON = "--model llama-3-8b --hardware a100-80gb --block-size 32 --lengths sharegpt --duration 20 --slo-jct-scale 2"
RATE_RPS = 2.0  # per replica
ENOUGH = 0.99


def simulate(options: str) -> dict[str, Any]:
    begin = time.perf_counter()
    records = harness.records_of("simulate", *options.split())
    return {"seconds": round(time.perf_counter() - begin, 1), "records": records}


def split(replicas: int, jobs: int) -> dict[str, Any]:
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
    """Search for the minimum number of whole replicas that reach a goodput at the rate of `replicas`."""
    options = (
        f"{COMMON} --recipes {recipe} --predictor noise:0.23 --rates {RATE_RPS * replicas:g} "
        f"--replicas {replicas // 4} --find-min-replicas slo.goodput_rps>={goodput_rps:.6g} --jobs {jobs}"
    )
    done = simulate(options)
    reach = [one for one in done["records"] if one["slo"]["goodput_rps"] >= goodput_rps]
    least = min(one["settings"]["replicas"] for one in reach)
    return {"command": f"skipjoin simulate {options}", "seconds": done["seconds"], "replicas": least}


def main() -> None:
    args = harness.parser(__doc__, replicas=4000, part=40, jobs=2).parse_args()
    record = harness.new_record()
    small = args.replicas // args.part
    part = split(small, args.jobs)
    goodput = ENOUGH * part["goodput_rps"]
    record |= {
        "split": split(args.replicas, args.jobs),
        "part": {
            "split": part,
            "replicas": small,
            "fewest": {recipe: fewest(recipe, small, goodput, args.jobs) for recipe in ("fcfs", "econoserve")},
        },
    }
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
