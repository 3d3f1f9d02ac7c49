"""Run all measurements that need a GPU.

Each part runs in its own process with a time limit, so a crash or a hang loses only that part; result.json is written
after each. Parts of an earlier run in FOLDER/result.json are kept with their dates. `machine` always runs first and
measures the copy bandwidth and the rate of matrix products, which the other parts are compared with.

`--stage` chooses parts and minutes of a plan for a quarter of an hour on a card, the most informative first:

    run.py --stage kernels     attention alone, decode steps, steps with a prompt, prompts
    run.py --stage sampling    a small model, steps that draw tokens, and weights in fp8
    run.py --stage pressure    recipes with far too little KV, swapped as it is or as int8
    run.py --stage peers       vLLM on the same card
    run.py --stage ranks       two processes on one card, recorded collectives, and copies

`peers` needs vLLM 0.22, which pins the card's torch 2.11, and the packages of both servers. They are brought in parts
of 60 MiB while other stages run, and without the libraries that a dense bfloat16 model does not load:

    pip install --target packages --no-deps vllm==0.22.0, and what both servers import and the image lacks
    tar -C packages --exclude='_vllm_fa2_C*' --exclude='_moe_C*' -c . | xz -1 -T0 | split -b 60M - packages.part.
    on the card: mkdir packages; cat packages.part.* | tar -xJ -C packages; BENCH_PACKAGES=$PWD/packages run.py ...

`--rehearse` runs parts on the CPU with tiny shapes to test the scripts, and writes rehearsal.json to a separate
folder. Correctness on a card is tested by `pytest -m gpu`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
# Seconds that a part may take beyond its share to finish a measurement, and seconds that are withheld from it for that.
_GRACE_S, _RESERVE_S = 30.0, 8.0
# Seconds in which a part that is stopped ends its servers.
_END_S = 15.0
# Minimum time of a part; with less it is not started.
_MIN_S = 15.0
_LOG_CHARS = 3000


class Part(NamedTuple):
    """A part; `weight` is its share of the remaining time relative to later parts."""

    name: str
    weight: float


# The most informative parts first.
PARTS = (
    Part("machine", 0.3),
    Part("attention", 1.5),
    Part("decode", 1.2),
    Part("mixed", 0.7),
    Part("prefill", 0.7),
    Part("small", 1.0),
    Part("sampled", 1.0),
    Part("fp8", 0.6),
    Part("pressure", 1.5),
    Part("peers", 4.0),
    Part("ranks", 0.4),
    Part("copies", 0.8),
)

# Parts and minutes of each stage of the plan.
STAGES = {
    "kernels": ("attention,decode,mixed,prefill", 3.3),
    "sampling": ("small,sampled,fp8", 2.0),
    "pressure": ("pressure", 2.0),
    "peers": ("peers", 3.9),
    "ranks": ("ranks,copies", 1.3),
}


def chosen(names: str | None) -> list[Part]:
    """Return the parts to run in their order.

    Raises:
        ValueError: A part is unknown.
    """
    known = {part.name for part in PARTS}
    wanted = known if names is None else {name.strip() for name in names.split(",")}
    if missing := sorted(wanted - known):
        raise ValueError(f"parts must be of {', '.join(part.name for part in PARTS)}, got {', '.join(missing)}")
    return [part for part in PARTS if part.name in wanted | {"machine"}]


def environment(device: str) -> dict[str, str]:
    """Return the environment of a part's process, which imports this Skipjoin and downloads nothing."""
    paths = (str(HERE.parents[2] / "src"), os.environ.get("PYTHONPATH", ""))
    ours = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "HF_HUB_OFFLINE": "1"}
    # On a CPU kernels run in Triton's interpreter, which must be set before the import.
    return os.environ | ours | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})


def run_part(part: Part, task: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Run a part in its own process group and return its status, seconds, figures and log."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as scratch:
        given, found, log = (Path(scratch) / name for name in ("task.json", "figures.json", "log.txt"))
        given.write_text(json.dumps(task))
        command = [sys.executable, str(HERE / "part.py"), part.name, str(given), str(found)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(task["device"]),
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
                status = "ok" if code == 0 else f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                status = f"stopped after {limit_s:.0f} s"
                # Servers are in groups of their own, which the part ends when it is asked to.
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            finally:
                # Its descendants end with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        outcome: dict[str, Any] = {
            "status": status,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - began, 1),
            "figures": json.loads(found.read_text()) if found.is_file() else {},
        }
        # Warnings name what was missing during the measurement.
        if text := log.read_text(errors="replace").replace(str(HERE.parents[2]), ".").replace(sys.prefix, "python"):
            outcome["log"] = text[-_LOG_CHARS:]
    return outcome


def run_all(parts: list[Part], minutes: float, file: Path, *, rehearse: bool) -> dict[str, Any]:
    """Run the parts, each with its share of the remaining time, and write the file after every part.

    Raises:
        RuntimeError: The first part cannot measure the machine. Nothing is written.
    """
    end = time.monotonic() + minutes * 60
    device = "cpu" if rehearse else "cuda"
    result: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"parts": {}}
    names = ",".join(part.name for part in parts)
    command = f"python benchmarks/performance/gpu/run.py --parts {names} --minutes {minutes:g}"
    result |= {
        "device": device,
        "rehearsal": rehearse,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command + (" --rehearse" if rehearse else ""),
        "statuses": {},  # of this call; `parts` may be of earlier ones
    }
    for index, part in enumerate(parts):
        left = end - time.monotonic()
        share = left * part.weight / sum(later.weight for later in parts[index:])
        known = result["parts"].get("machine", {}).get("figures", {})
        if left < _MIN_S:
            outcome: dict[str, Any] = {"status": "not begun: no time left", "seconds": 0.0, "figures": {}}
        else:
            task = {
                "device": device,
                "seconds": min(share, left - _RESERVE_S),
                "ceilings": {} if part.name == "machine" else known["ceilings"],
            }
            print(f"{part.name}: {share:.0f} s", file=sys.stderr, flush=True)
            if part.name == "machine":  # results of earlier runs do not count
                result["parts"].pop(part.name, None)
            outcome = run_part(part, task, min(share + _GRACE_S, left))
            outcome["gpu"] = (outcome["figures"] if part.name == "machine" else known).get("machine", {}).get("gpu")
        result["statuses"][part.name] = outcome["status"]
        if part.name == "machine" and "ceilings" not in outcome["figures"]:
            raise RuntimeError(f"the card cannot be measured: {outcome.get('log', outcome['status'])[-500:]}")
        # A part without figures does not replace one with figures.
        if outcome["figures"] or not result["parts"].get(part.name, {}).get("figures"):
            result["parts"][part.name] = outcome
        result["machine"] = result["parts"].get("machine", {}).get("figures", {}).get("machine")
        file.write_text(json.dumps(result, indent=1) + "\n")
    return result


def summary(result: Mapping[str, Any]) -> list[str]:
    """Return a line on each part, and the end of the log of those that failed in this call."""
    lines = []
    for name, outcome in result["parts"].items():
        status = result["statuses"].get(name, outcome["status"])
        lines.append(f"{name:10} {status}, {outcome['seconds']:.0f} s")
        if status != "ok":
            lines += [f"  | {line}" for line in outcome.get("log", "").splitlines()[-4:]]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help=f"some of: {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--stage", choices=STAGES, help="parts and minutes of a stage of the plan")
    parser.add_argument("--minutes", type=float, help="time limit of the whole run (default: the stage's, or 9)")
    parser.add_argument("--out", type=Path, help="folder of result.json (default: this one)")
    parser.add_argument("--rehearse", action="store_true", help="run tiny shapes on the CPU")
    args = parser.parse_args()
    try:
        of_stage, minutes = STAGES.get(args.stage, (None, 9.0))
        parts = chosen(args.parts or of_stage)
    except ValueError as error:
        parser.error(str(error))
    folder = args.out or (Path(tempfile.mkdtemp(prefix="skipjoin-rehearsal-")) if args.rehearse else HERE)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ("rehearsal.json" if args.rehearse else "result.json")
    try:
        result = run_all(parts, args.minutes or minutes, file, rehearse=args.rehearse)
    except RuntimeError as error:
        raise SystemExit(f"error: {error}") from None
    print("\n".join(summary(result)))
    print(f"wrote {file}")
    raise SystemExit(any(status != "ok" for status in result["statuses"].values()))


if __name__ == "__main__":
    main()
