"""A request does not change, and its progress changes through its own methods only."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from functools import cache
from pathlib import Path

import pytest

import skipjoin
from skipjoin.core.request import Progress, Request
from support.load import make

SOURCE = Path(skipjoin.__file__).parent
FIELDS = {field.name for field in fields(Progress)}
WRITERS = {name for name, value in vars(Progress).items() if callable(value) and not name.startswith("_")}
MUTATING = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}
# Which modules call which methods of `Progress`, below `skipjoin`.
CALLERS = {
    "core/decide": {"begin", "settle", "rewind", "place", "pause", "evict", "find", "fill_down"},
    "core/engine": {"begin", "settle", "append", "extend", "finish", "expect"},
    "core/foreign": {"begin", "withdraw", "rewind", "place", "pause"},
    "core/kv": {"reserve", "find"},
    "engine": {"await_grammar", "expect"},
    "exec/ranks": {"extend", "fill_down"},
    "policies": {"lift"},
    "server/engines": {"append", "expect"},
    "sim": {"rewind", "expect"},
    "vllm": {"await_grammar", "extend", "finish", "expect", "reserve", "find"},
}


@cache
def modules() -> dict[str, ast.Module]:
    return {
        path.relative_to(SOURCE).as_posix(): ast.parse(text)
        for path in SOURCE.rglob("*.py")
        if ".progress" in (text := path.read_text())
    }


def progress_names(tree: ast.AST) -> set[str]:
    """Return the names to which an expression that ends with `.progress` is assigned."""
    names = {"progress"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.NamedExpr) and isinstance(node.value, ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name) and node.value.attr == "progress"}
    return names


def uses(tree: ast.AST) -> Iterator[tuple[str, ast.Attribute]]:
    """Iterate over the attributes of the progress of a request, with "write", "call" or "read"."""
    names = progress_names(tree)

    def is_progress(node: ast.expr) -> bool:
        return (isinstance(node, ast.Attribute) and node.attr == "progress") or (
            isinstance(node, ast.Name) and node.id in names
        )

    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not is_progress(node.value):
            continue
        parent = parents[node]
        is_changed = isinstance(parent, ast.Attribute) and parent.attr in MUTATING and node.attr == "output"
        is_changed |= isinstance(parent, ast.Subscript) and not isinstance(parent.ctx, ast.Load)
        if is_changed or not isinstance(node.ctx, ast.Load):
            yield "write", node
        elif isinstance(parent, ast.Call) and parent.func is node:
            yield "call", node
        else:
            yield "read", node


def test_a_request_is_frozen() -> None:
    request = make(0)
    for field in fields(Request):
        with pytest.raises(FrozenInstanceError):
            setattr(request, field.name, 1)


def test_only_its_methods_write_progress() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for how, node in uses(tree)
        if how == "write" and node.attr in FIELDS and name != "core/request.py"
    ]
    assert not found


def test_writers_of_progress_are_called_where_the_table_says() -> None:
    called = defaultdict[str, set[str]](set)
    for name, tree in modules().items():
        for how, node in uses(tree):
            if how == "call" and node.attr in WRITERS:
                called[max((place for place in CALLERS if name.startswith(place)), key=len, default=name)].add(
                    node.attr
                )
    assert called == CALLERS


@pytest.mark.parametrize(
    "text",
    [
        "request.progress.known = 1",
        "request.progress.known += 1",
        "slice_.request.progress.output.append(1)",
        "progress = request.progress; progress.output[0] = 1",
        "done = request.progress\ndone.planned = 2",
        "del request.progress.output[:]",
    ],
)
def test_every_way_to_write_is_found(text: str) -> None:
    assert [how for how, _ in uses(ast.parse(text))].count("write") == 1
