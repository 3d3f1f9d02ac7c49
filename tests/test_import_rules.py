from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SOURCE / "skipjoin"
# Modules with which a decision depends on nothing but its arguments.
PURE_STDLIB = {
    *("__future__", "array", "bisect", "collections", "dataclasses", "difflib", "enum", "functools", "hashlib"),
    *("heapq", "inspect", "itertools", "math", "numbers", "operator", "statistics", "sys", "types", "typing"),
}
# Of recipes, these load some from files and packages.
LOADERS = {"files", "packages", "registry"}

# For each package or module under skipjoin, the parts of skipjoin that it may import. Name a package itself to allow
# imports within it. A name does not cover subpackages that have their own rule. `routes` imports
# for type checkers only.
RULES = """
__main__: cli
adapters:
core: core core.decide core.kv.interface core.kv.operations core.kv.reservations
core.kv: core.kv core.prefixes core.request core.step
core.decide: core core.decide core.kv.interface core.kv.operations core.kv.reservations
policies: core core.kv.interface core.kv.reservations policies
extras: options version
kv_format:
options:
policy: core core.kv.interface options policies recipes
recipes: core options policies recipes
routes: config
pooling:
sampling: pooling structured_output
structured_output:
system: system
version:
config: config config.access config.key_files kv_format options recipes
config.access: config.key_files options
config.key_files: options
config.profile: config policies.cost system.disk system.durable system.folders
observe: core core.kv.reservations observe
workload: config core observe options routes workload
report: config report system.disk
sim: config core exec.base exec.simulated kv_format observe policies recipes sim
sim.experiments: builtin config config.profile core core.decide.scheduler core.kv.ledger exec.simulated forecast
    kv_format model.config model.errors model.folder observe options policies recipes report sim sim.experiments
    system.garbage version workload
loadtest: config core loadtest observe options routes system.machine system.unreachable version
    workload
demo: config demo loadtest observe report system.disk workload
replay: config core options policies recipes replay sim.experiments workload
forecast: config core.forecast forecast options system.durable system.folders version
exec.base: core
exec.simulated: core exec.base
exec: adapters config.profile core exec exec.base kv_format model policies.cost pooling sampling system.container
    system.machine version
exec.ranks: adapters config.profile core exec exec.base exec.ranks model sampling system.container system.garbage
    version
model: builtin formats kv_format model pooling sampling schemas structured_output system.container system.disk
    system.durable system.folders system.own_folder
exec.ranks: adapters config.profile core exec exec.base exec.ranks model sampling system.container system.garbage
    version
builtin:
formats: formats schemas structured_output
schemas: schemas structured_output
engine: adapters builtin config config.profile core core.decide.scheduler core.kv.ledger core.kv.operations engine exec
    exec.base exec.ranks forecast formats kv_format model options policies pooling recipes sampling structured_output
    system.durable system.machine version
async_llm: chat core engine formats llm_arguments local_engine pooling sampling
llm: chat core formats llm_arguments local_engine model.tokenizer pooling recipes sampling structured_output
llm_arguments: chat core formats sampling
local_engine: adapters chat config core engine formats model options sampling structured_output
chat: formats model.chat_text model.tokenizer sampling structured_output
server.engines: adapters config core core.kv.block_pool core.kv.operations engine exec.ranks.cluster exec.ranks.nodes
    kv_format model.errors model.folder observe options policies pooling recipes sampling server.engines server.logs
    server.metrics system.container system.disk system.garbage system.machine system.own_folder system.unreachable
    version
server.api: adapters chat config config.access config.key_files core engine.forecasting engine.text formats
    model.errors model.folder model.grammar_check model.tokenizer observe pooling recipes routes sampling server.api
    server.engines
    server.metrics structured_output system.unreachable version
server.relay: config config.access routes server.api server.listeners server.logs server.relay system.unreachable
server.batches: adapters config core.request routes sampling server.api server.batches server.engines.errors
    server.metrics system.disk system.folders system.locks version
server: builtin config config.access core engine.forecasting extras model.errors model.folder model.generation_config
    model.tokenizer observe pooling recipes server server.api server.batches server.engines system.garbage
    system.machine
sglang: options recipes sglang
vllm: core core.decide.scheduler core.kv.block_pool core.kv.interface core.kv.operations core.kv.reservations forecast
    observe options policies recipes routes version vllm
cli: builtin cli config config.profile core.request demo engine extras forecast kv_format llm loadtest local_engine
    model observe options policies recipes replay report sampling server server.batches server.engines server.logs
    server.relay sim sim.experiments system.container system.disk system.durable system.folders system.garbage
    system.machine system.unreachable version workload
"""
ALLOWED = {
    name: set(parts.split())
    for name, parts in (rule.split(":") for rule in RULES.replace("\n    ", " ").strip().splitlines())
}
# Parts that import only the standard library and skipjoin, and use neither clocks nor random numbers.
PURE = {"core", "core.kv", "core.decide", "options", "policies", "policy", "recipes"}
STDLIB_ONLY = {
    *("adapters", "config", "config.access", "config.key_files", "config.profile", "exec.base"),
    *("exec.simulated", "extras", "observe", "pooling", "routes", "sampling", "sim", "sim.experiments"),
    *("system", "version", "workload"),
}
# The layers of `core`. A module imports only from its own layer and those above it in this table.
CORE_LAYERS = (
    ("__init__", "forecast", "prefixes", "refusals", "waits"),
    ("request",),
    ("step",),
    ("kv",),
    ("context", "events", "promises"),
    ("policy",),
    ("policy_set",),
    ("selective",),
    ("decide",),
    ("engine", "foreign"),
)
# The modules of `core/kv` that implement one ledger. `reservations` and `block_pool` define types for every ledger.
PARTS = ("holdings", "tiers", "shared_blocks", "prefix_cache", "cpu_cache", "request_blocks", "transfers")
LEDGER = {f"skipjoin.core.kv.{name}" for name in ("ledger", *PARTS)}
# Modules of `server.api` that prepare and run requests for any transport, such as HTTP or batch files.
WITHOUT_HTTP = {
    *("chat", "chat_body", "completions", "forecasting", "generation", "jobs", "limits", "openai_format", "options"),
    *("protocol", "responses", "service"),
}
# Paths in which marked imports may be inside functions: optional back ends, the package itself, whose import must stay
# light, the command line, whose help must start quickly, code that needs Ray, SGLang or vLLM, the engine process, which
# imports torch without garbage collection, and the database of batches.
LAZY = (
    *("exec", "model", "forecast", "formats", "__init__.py", "__main__.py", "cli", "engine", "kv_format.py"),
    *("server/lifecycle.py", "server/settings.py", "server/batches/database.py"),
    *("server/engines/engine_process.py", "server/engines/engine_server.py"),
    *("sglang/plugin.py", "vllm/__init__.py", "vllm/plugin.py"),
)


class Import(NamedTuple):
    file: Path
    line: int
    module: str
    at_top: bool
    marked: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.line} imports {self.module}"


def imports_of(file: Path) -> Iterator[Import]:
    text = file.read_text()
    lines = text.splitlines()
    package = file.relative_to(SOURCE).with_suffix("").parts[:-1]

    def walk(node: ast.AST, at_top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # contains no imports
                continue
            names: list[str] = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = list(package[: len(package) - child.level + 1]) if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                # `from skipjoin.exec import local` imports skipjoin.exec.local.
                names = [f"{module}.{alias.name}" if is_module(module, alias.name) else module for alias in child.names]
            for name in names:
                marked = "# noqa: PLC0415" in lines[child.lineno - 1]
                yield Import(file, child.lineno, name, at_top, marked)
            # An import under TYPE_CHECKING or in a try at module level is still at the top.
            still = at_top and isinstance(child, ast.If | ast.Try | ast.ExceptHandler)
            yield from walk(child, still)

    yield from walk(ast.parse(text), True)


def is_module(package: str, name: str) -> bool:
    path = SOURCE.joinpath(*package.split("."), name)
    return path.is_dir() or path.with_suffix(".py").is_file()


def module_of(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def part_of(file: Path) -> str:
    """Return the most specific key of `ALLOWED` that covers a file."""
    return rule_of(list(file.relative_to(PACKAGE).with_suffix("").parts))


def rule_of(parts: list[str]) -> str:
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in ALLOWED), names[-1])


def is_within(module: str, part: str) -> bool:
    return module == f"skipjoin.{part}" or module.startswith(f"skipjoin.{part}.")


def is_allowed(module: str, names: set[str]) -> bool:
    """Return whether a name covers the module and is at least as specific as the module's own rule."""
    rule = rule_of(module.split(".")[1:] or ["__init__"])
    return any(is_within(module, name) and (name == rule or not is_within(f"skipjoin.{rule}", name)) for name in names)


FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def imports() -> list[Import]:
    return [found for file in FILES for found in imports_of(file)]


def of_part(part: str, *, skipjoin: bool) -> list[Import]:
    found = [found for found in imports() if part_of(found.file) == part]
    return [imported for imported in found if (imported.module.split(".")[0] == "skipjoin") is skipjoin]


def broken(rule: str, found: list[Import]) -> str:
    return rule + ":\n" + "\n".join(map(str, found))


def test_imports_are_found() -> None:
    assert {"core.kv", "core.decide", "policies", "sim.experiments", "exec.base"} <= set(map(part_of, FILES))
    assert len(imports()) > 50


def test_every_package_has_a_rule() -> None:
    assert {part_of(file) for file in FILES} - set(ALLOWED) <= {"__init__"}


@pytest.mark.parametrize("part", ALLOWED)
def test_package_imports_only_what_its_rule_allows(part: str) -> None:
    wrong = [found for found in of_part(part, skipjoin=True) if not is_allowed(found.module, ALLOWED[part])]
    assert not wrong, broken(f"{part} may import {sorted(ALLOWED[part])} of skipjoin", wrong)


@pytest.mark.parametrize("part", sorted(PURE | STDLIB_ONLY))
def test_light_packages_import_only_the_standard_library(part: str) -> None:
    names = PURE_STDLIB if part in PURE else sys.stdlib_module_names
    wrong = [
        found
        for found in of_part(part, skipjoin=False)
        if found.module.split(".")[0]
        not in (sys.stdlib_module_names if part == "recipes" and found.file.stem in LOADERS else names)
    ]
    assert not wrong, broken(f"{part} imports the standard library only, and if pure, {sorted(PURE_STDLIB)}", wrong)


def test_core_depends_on_the_ledger_interface_only() -> None:
    wrong = [
        found
        for found in imports()
        if part_of(found.file).split(".")[0] == "core"
        and module_of(found.file) not in LEDGER
        and found.module in LEDGER
    ]
    assert not wrong, broken("core imports the interfaces of ledgers, so that it runs with any", wrong)


def test_core_imports_only_from_its_own_layer_and_those_below() -> None:
    layer_of = {name: number for number, names in enumerate(CORE_LAYERS) for name in names}
    core = [
        found for found in imports() if is_within(module_of(found.file), "core") and is_within(found.module, "core")
    ]
    assert {layer(found.file) for found in core} == layer_of.keys() - {"__init__"} - {"forecast", "prefixes", "waits"}
    wrong = [found for found in core if layer_of[layer(found.file)] < layer_of[found.module.split(".")[2]]]
    assert not wrong, broken(f"core has the layers {CORE_LAYERS}", wrong)


def layer(file: Path) -> str:
    return file.relative_to(PACKAGE / "core").with_suffix("").parts[0]


def test_only_the_command_line_may_import_the_server() -> None:
    users = {part for part, names in ALLOWED.items() if any(name.split(".")[0] == "server" for name in names)}
    assert {part for part in users if part.split(".")[0] != "server"} == {"cli"}


def test_generation_modules_do_not_import_http_frameworks() -> None:
    modules = {f"skipjoin.server.api.{name}" for name in WITHOUT_HTTP}
    wrong = [
        found
        for found in imports()
        if module_of(found.file) in modules and found.module.split(".")[0] in {"starlette", "fastapi", "uvicorn"}
    ]
    assert not wrong, broken("generation does not depend on HTTP", wrong)


def test_the_plugin_of_vllm_imports_only_what_vllm_requires() -> None:
    by_file: dict[Path, list[str]] = {file: [] for file in FILES}
    for found in imports():
        if found.at_top:
            by_file[found.file].append(found.module)
    files = {module_of(file): file for file in FILES}
    left = [module for module, file in files.items() if part_of(file) == "vllm"]
    seen, others = set(left), set[str]()
    while left:
        for module in by_file[files[left.pop()]]:
            if module not in files:
                others.add(module.split(".")[0])
            elif module not in seen:
                seen.add(module)
                left.append(module)
    assert others - sys.stdlib_module_names == {"numpy", "prometheus_client", "safetensors", "torch", "vllm"}


def test_imports_have_no_cycles() -> None:
    """Imports for type checkers count, but imports inside functions do not."""
    modules = {module_of(file): set[str]() for file in FILES}
    for found in imports():
        if found.at_top and found.module in modules:
            modules[module_of(found.file)].add(found.module)
    tuple(TopologicalSorter(modules).static_order())  # raises CycleError


def test_packages_are_documented_in_the_order_of_their_imports() -> None:
    text = (SOURCE.parent / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (`.+?) \|", text.partition("| package | purpose |")[2].partition("\n\n")[0], re.MULTILINE)
    names = [
        (re.sub(r"/$|\.py$", "", name), row) for row, cell in enumerate(rows) for name in re.findall("`(.+?)`", cell)
    ]
    row_of = {name.replace("/", "."): row for name, row in names}

    def row(module: str) -> int | None:
        parts = module.split(".")[1:]
        return next(
            (row for n in range(len(parts), 0, -1) if (row := row_of.get(".".join(parts[:n]))) is not None), None
        )

    outside = [found for found in imports() if not is_within(found.module, "core") and found.module != "skipjoin"]
    pairs = [(row(module_of(found.file)), row(found.module), found) for found in outside]
    wrong = [found for by, of, found in pairs if by is not None and of is not None and by < of]
    assert len(rows) > 30
    assert not wrong, broken("docs/architecture.md lists a package below those that it imports", wrong)


def test_imports_are_at_the_top_of_the_file() -> None:
    wrong = [
        found
        for found in imports()
        if not found.at_top and not (found.marked and str(found.file.relative_to(PACKAGE)).startswith(LAZY))
    ]
    assert not wrong, broken(f"only marked imports in {LAZY} may be inside functions", wrong)


def test_scheduling_simulation_and_placement_of_ranks_load_no_heavy_modules() -> None:
    program = (
        "import sys\n"
        "import skipjoin.core.engine, skipjoin.policies, skipjoin.recipes, skipjoin.sim.driver\n"
        "import skipjoin.exec.ranks.rank_program\n"
        "print(*sorted({'torch', 'numpy', 'ray', 'asyncio', 'zmq', 'transformers', 'fastapi'} & set(sys.modules)))\n"
    )
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert loaded.stdout.split() == []
