"""SGLang's hooks and its policy of waiting requests, as released, with Skipjoin's order: `make test-sglang`.

SGLang itself does not run on a CPU. Only the two modules under test are its own; all that they import is a mock.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

_PACKAGE = find_spec("sglang")
pytestmark = [
    pytest.mark.skipif(_PACKAGE is None, reason="needs SGLang, as make test-sglang installs it"),
    pytest.mark.sglang,
]
REAL = ("sglang.srt.plugins", "sglang.srt.plugins.hook_registry", "sglang.srt.managers.schedule_policy")
GROUP = "sglang.srt.plugins"


class MockedPackage(MetaPathFinder, Loader):
    """Finder of SGLang's modules: those under test are its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] != "sglang":
            return None
        if name in REAL:
            file = self._folder.parent.joinpath(*name.split("."))
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            return spec_from_file_location(name, file, submodule_search_locations=[] if name == GROUP else None)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield SGLang's modules `plugins` and `schedule_policy`, with Skipjoin's plugin as the only installed one."""
    assert _PACKAGE is not None
    assert _PACKAGE.origin is not None
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "meta_path", [MockedPackage(Path(_PACKAGE.origin).parent), *sys.meta_path])
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    # Their packages are mocks, so `from sglang.srt import plugins` would be one, too.
    plugins, schedule_policy = import_module(GROUP), import_module("sglang.srt.managers.schedule_policy")
    entry_points = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
    ours = [EntryPoint(name, value, GROUP) for name, value in entry_points[GROUP].items()]
    monkeypatch.setattr(plugins, "entry_points", lambda group: ours if group == GROUP else [])
    monkeypatch.setattr(plugins, "envs", SimpleNamespace(**dict.fromkeys(("SGLANG_PLUGINS", "SGLANG_PLATFORM"), UNSET)))
    yield SimpleNamespace(plugins=plugins, policy=schedule_policy)
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


UNSET = SimpleNamespace(get=lambda: None)


def waiting(rid: str, arrival: int, prompt: int, entry_s: float) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=list(range(prompt)),
        output_ids=[],
        prefix_len=64,  # as if a common beginning were cached, beyond which SGLang looks for no equal prefix
        num_matched_prefix_tokens=0,
        arrival_processed_tokens=arrival,
        extra_key=None,
        cache_salt=None,
        time_stats=SimpleNamespace(wait_queue_entry_time=entry_s),
    )


def ordered(sglang: Any, policy: str = "shortest-prefill-first") -> list[str]:
    cache = SimpleNamespace(disable=False, supports_fast_match_prefix=lambda: False)
    queue = [waiting("long", 0, 200, 0.0), waiting("short", 100, 10, 1.0), waiting("late", 100_000, 10, 2.0)]
    sglang.policy.SchedulePolicy(policy, cache, False, False, False).calc_priority(queue, None, 100_000)
    return [request.rid for request in queue]


def test_the_plugin_orders_waiting_requests_by_arrival_and_prefill(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPJOIN_SGLANG", "adaptive")
    sglang.plugins.load_plugins()
    # 400 x 200 tokens after the long prompt another one may no longer overtake it, as SGLang's own order lets it.
    assert ordered(sglang) == ["short", "long", "late"]


def test_without_the_environment_variable_the_order_is_sglangs_own(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKIPJOIN_SGLANG", raising=False)
    sglang.plugins.load_plugins()
    assert ordered(sglang) == ["short", "late", "long"]


def test_another_policy_ends_the_scheduler(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPJOIN_SGLANG", "adaptive")
    sglang.plugins.load_plugins()
    with pytest.raises(SystemExit, match="needs --schedule-policy shortest-prefill-first"):
        ordered(sglang, "lpm")


def test_a_release_with_another_sort_is_refused(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPJOIN_SGLANG", "adaptive")
    monkeypatch.delattr(sglang.policy.SchedulePolicy, "_sort_by_shortest_prefill")
    with pytest.raises(SystemExit, match=r"has no _sort_by_shortest_prefill.*use release 0\.5\.23"):
        sglang.plugins.load_plugins()
