from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import make_store, tiny_model

from skipjoin.exec.base import LargestStep
from skipjoin.exec.rank_model import warm_up
from support.worlds import exhaustive


@pytest.mark.parametrize("model", ["mistral", exhaustive("opt:invariant")])
def test_steps_after_the_warm_up_compile_nothing(model: str) -> None:
    pytest.importorskip("triton")
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *sys.path])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(here / "count_compilations.py"), model]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        family, at_start, *later = line.split()
        assert not later, f"{family}: steps compile {later}"
        assert int(at_start) > 10
    assert len(done.stdout.splitlines()) == 1


def test_backends_without_compilation_have_no_warm_up() -> None:
    model = tiny_model("llama")
    pool = make_store(model, 1).device
    pool.tensor.fill_(7.0)
    warm_up(model, pool, LargestStep(100, 8, 256))
    assert (pool.tensor == 7.0).all()
