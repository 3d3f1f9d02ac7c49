from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import skipjoin

SOURCE = Path(skipjoin.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing", "joblib"}
CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "__import__", "torch.load", "compile"}
# It reads pickled weights with weights_only and converts them to safetensors.
CONVERTER = SOURCE / "model" / "convert.py"
# It runs simulations in its own child processes over private pipes. No server imports it.
SWEEP = SOURCE / "sim" / "experiments" / "sweep.py"
# Its connections are authenticated by a challenge and carry plain bytes.
LINKS = SOURCE / "exec" / "ranks" / "links.py"
# A rank's process and the engine whose child it is, over an inherited pair of sockets that no other process can open.
OWN_RANKS = [SOURCE / "exec" / "ranks" / name for name in ("own_ranks.py", "rank_program.py")]


def test_source_files_are_found() -> None:
    assert len(FILES) > 40


def test_source_has_no_dangerous_imports_or_calls() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                _check_import({alias.name.split(".")[0] for alias in node.names}, file)
            elif isinstance(node, ast.ImportFrom):
                modules = MODULES - ({"multiprocessing"} if file in (SWEEP, LINKS, *OWN_RANKS) else set())
                assert (node.module or "").split(".")[0] not in modules, file
            elif isinstance(node, ast.Call):
                _check_call(node, file)
            elif isinstance(node, ast.Constant):
                assert node.value not in ("0.0.0.0", "::"), file


@pytest.mark.parametrize("folder", ["benchmarks", "tools"])
def test_benchmarks_and_tools_do_not_trust_remote_code(folder: str) -> None:
    for file in (SOURCE.parents[1] / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                _check_trust(_name(node.func), _keywords(node))


def _name(function: ast.expr) -> str:
    """Return the dotted name of a called function, which begins with "?" if an expression returns its object."""
    if isinstance(function, ast.Attribute):
        return f"{_name(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else "?"


def _keywords(node: ast.Call) -> dict[str | None, str]:
    checked = ("trust_remote_code", "weights_only")
    return {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg in checked}


def _check_trust(name: str, keywords: dict[str | None, str]) -> None:
    """Without the argument, auto classes of transformers ask on standard input whether to run a folder's code."""
    trusts = keywords.get("trust_remote_code")
    assert trusts in ((None, "False") if not re.fullmatch(r"(\w+\.)?Auto\w+\.from_pretrained", name) else ("False",))


def _check_import(modules: set[str], file: Path) -> None:
    if file == CONVERTER:
        # It uses pickle only for the exception of torch.load.
        source = file.read_text(encoding="utf-8")
        assert source.count("pickle.") == source.count("pickle.UnpicklingError")
        modules -= {"pickle"}
    assert not MODULES & modules


def _check_call(node: ast.Call, file: Path) -> None:
    name = _name(node.func)
    keywords = _keywords(node)
    _check_trust(name, keywords)
    if name == "torch.load" and file == CONVERTER:
        assert keywords.get("weights_only") == "True"
        return
    assert name not in CALLS
    if file == LINKS:
        assert not name.endswith((".recv", ".send"))  # These would pickle.
    assert not name.endswith((".recv_pyobj", ".send_pyobj"))
