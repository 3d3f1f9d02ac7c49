"""Break the source on purpose, one mutation at a time, and check that the tests fail.

    python tools/mutations.py [NAME ...]

Works on a copy. First the tests must pass on the unchanged copy. The exit code is 1 if a mutation is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "benchmarks", "pyproject.toml")
# Exit codes of pytest.
PASSED, FAILED = 0, 1


class Mutation(NamedTuple):
    """A replacement in one file below `src/skipjoin`, and the tests, below `tests`, that must notice it.

    Attributes:
        breaks: What no longer holds.
        old: Text that occurs exactly once in the file.
    """

    breaks: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = {
    "planner": Mutation(
        "a prefix-cache hit is only credited while the request holds its blocks",
        "core/decide/plan.py",
        "if is_credited and blocks_of(request) is None:",
        "if False:",
        ("core/kv/test_prefixes.py", "recipes/test_recorded_plans.py"),
    ),
    "evictor": Mutation(
        "an admission evicts a running request only after it has generated a token",
        "core/decide/holders.py",
        "return is_of_class and progress.is_newly_resident and progress.last_plan >= latest",
        "return False",
        ("core/decide/test_preemption_rules.py", "recipes/test_recorded_plans.py"),
    ),
    "ledger": Mutation(
        "KV that a failed swap-in did not bring is lost",
        "core/kv/tiers.py",
        "keep = held.device.index(move.target[0])",
        "keep = len(held.device)",
        ("core/kv/test_ledger.py", "core/kv/test_two_tiers.py", "recipes/test_recorded_plans.py"),
    ),
    "prefix cache": Mutation(
        "at least one token of a prompt is computed after a hit",
        "core/kv/prefix_cache.py",
        "tokens = request.progress.known - 1",
        "tokens = request.progress.known",
        ("core/kv/test_prefixes.py",),
    ),
    "shared blocks": Mutation(
        "slots are saved before a borrower overwrites them",
        "core/kv/shared_blocks.py",
        "if (count := need - self._limit(",
        "if (count := need - 1 - self._limit(",
        ("core/kv/test_bidirectional_blocks.py", "recipes/test_recorded_plans.py"),
    ),
    "sampler": Mutation(
        "each position of a request has a random number of its own",
        "model/draws.py",
        "z = _mix(_mix(seed & _MASK) + position * 0x9E3779B97F4A7C15)",
        "z = _mix(_mix(seed & _MASK))",
        ("model/test_model_sampler.py",),
    ),
    "transfer": Mutation(
        "a copy that raised an error is reported as failed",
        "exec/transfer.py",
        "if (error := copy.exception()) is None:",
        "if (error := copy.exception()) is None or True:",
        ("exec/test_transfer.py",),
    ),
    "messages": Mutation(
        "ranks get the whole block table of a request whose blocks were replaced",
        "exec/ranks/plan_messages.py",
        "if blocks[:kept] != sent.table:",
        "if False:",
        ("exec/test_worker_messages.py",),
    ),
    "limits": Mutation(
        "a slot of the queue is released once",
        "server/api/limits.py",
        "            self._open = False\n",
        "",
        ("server/test_server_limits.py",),
    ),
    "batches": Mutation(
        "a server ends only the lines that it still runs",
        "server/batches/line_rows.py",
        "valid = [result for key, result in unique.items() if key in held]",
        "valid = [*unique.values()]",
        ("server/test_batch_store.py",),
    ),
}


def mutated(mutation: Mutation, root: Path) -> str:
    """Return the file's text with the mutation.

    Raises:
        ValueError: If the text to replace does not occur exactly once.
    """
    text = (root / "src" / "skipjoin" / mutation.path).read_text(encoding="utf-8")
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(
            f"{mutation.path} must have the text {mutation.old!r} exactly once, it has it {count} times; choose "
            "another text in tools/mutations.py that breaks the same"
        )
    return text.replace(mutation.old, mutation.new)


def run_tests(copy: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    options = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-n", "0", "--tb", "no", "-r", "f")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/{name}" for name in tests)],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / "src")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    named = [line for line in lines if line.startswith("FAILED")]
    return done.returncode, (named or lines[-1:])[0]


def is_caught(mutation: Mutation, copy: Path) -> tuple[bool, str]:
    """Return whether the tests fail with the mutation, and the line that says so."""
    path = copy / "src" / "skipjoin" / mutation.path
    before = path.read_text(encoding="utf-8")
    path.write_text(mutated(mutation, copy), encoding="utf-8")
    _forget_bytecode(path)
    try:
        code, line = run_tests(copy, mutation.tests)
    finally:
        path.write_text(before, encoding="utf-8")
        _forget_bytecode(path)
    if code not in (PASSED, FAILED):
        raise RuntimeError(f"pytest ended with exit code {code}: {line}")
    return code == FAILED, line


def _forget_bytecode(path: Path) -> None:
    # A change within a second that keeps the file's size would go unnoticed.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(MUTATIONS)}")
    names = parser.parse_args().names or [*MUTATIONS]
    if unknown := set(names) - set(MUTATIONS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MUTATIONS)}")
    chosen = {name: MUTATIONS[name] for name in names}
    for mutation in chosen.values():
        mutated(mutation, ROOT)
    missed = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
            else:
                shutil.copy(source, copy / name)
        tests = tuple(dict.fromkeys(test for mutation in chosen.values() for test in mutation.tests))
        code, line = run_tests(copy, tests)
        if code != PASSED:
            sys.exit(f"the tests fail without a mutation: {line}")
        for name, mutation in chosen.items():
            was_caught, line = is_caught(mutation, copy)
            print(f"{name}: {'caught' if was_caught else 'MISSED'}: {line}", flush=True)
            if not was_caught:
                missed.append(name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
