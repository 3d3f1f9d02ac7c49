from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.config import ConfigError, EngineConfig
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.eviction import Recompute
from skipjoin.recipes import RECIPES, Settings, absolute, build, find, names_in
from skipjoin.report.results import load_results
from skipjoin.sim.experiments.machines import Machine

MACHINE = Machine(hardware="a100-40gb", model="opt-13b", kv_gib=4)
SETTINGS = Settings(LinearCost(0.01, 1e-4), has_true_forecasts=True)
SIMULATE = ["simulate", "--model", "opt-13b", "--kv-gib", "1.5", "--rates", "8", "--requests", "20", "--jobs", "1"]


def test_the_package_has_eight_recipes() -> None:
    assert set(RECIPES) == {"adaptive", "fcfs", "sarathi", "fastserve", "alise", "econoserve", "bros", "srpt"}


def test_a_list_is_split_at_the_commas_outside_brackets() -> None:
    given = "fcfs, econoserve[time_ranges_s=0.5,1,2,kv_range=64] ,./a [1]/b.py:edf[x=1],c"
    assert names_in(given) == [
        "fcfs",
        "econoserve[time_ranges_s=0.5,1,2,kv_range=64]",
        "./a [1]/b.py:edf[x=1]",
        "c",
    ]
    found = find("econoserve[ kv_range = 64, time_ranges_s=0.5,1,2 ]")
    assert found.fixed == {"kv_range": 64, "time_ranges_s": "0.5,1,2"}
    assert found.name == find("econoserve[time_ranges_s=0.5,1,2,kv_range=64]").name


def test_parameters_in_brackets_reach_the_policies() -> None:
    assert type(build("fastserve", SETTINGS).eviction) is not Recompute
    assert type(build("fastserve[eviction=recompute,paced=off]", SETTINGS).eviction) is Recompute
    assert find("fastserve[eviction=recompute,paced=off]").resolve(SETTINGS, {}).paced is False  # type: ignore[attr-defined]


def test_variants_are_simulated_by_one_command_and_named_in_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from skipjoin.recipes import Settings, fastserve, recipe\n"
        "from skipjoin.recipes.fastserve import QueueParams\n"
        "@recipe\ndef mine(s: Settings, p: QueueParams):\n    return fastserve.fastserve(s, p)\n"
    )
    names = [
        "fastserve",
        "fastserve[eviction=recompute]",
        "fastserve[starvation_s=3,eviction=defer]",
        "mine.py:mine",
        "mine.py:mine[eviction=recompute]",
    ]
    recipes = ["--recipes", ",".join(names).replace("mine.py", "./mine.py"), "--set", "starvation_s=2"]
    run = CliRunner().invoke(app, [*SIMULATE, *recipes, "--out", "out.json"])
    assert run.exit_code == 0, run.output
    records = {record["recipe"]: record for record in load_results([tmp_path / "out.json"])}
    assert list(records) == names
    assert [
        (record["recipe_params"]["eviction"], record["recipe_params"]["starvation_s"]) for record in records.values()
    ] == [
        ("proactive", 2),
        ("recompute", 2),
        ("defer", 3),  # brackets override --set, which applies to all recipes
        ("proactive", 2),
        ("recompute", 2),
    ]
    assert records[names[2]]["settings"]["starvation_s"] == 3
    latency = [record["normalized_latency_s"] for record in records.values()]
    assert latency[0] == latency[3] != latency[1] == latency[4]
    assert all(name in run.stdout for name in names)


def test_recipes_with_the_same_name_in_results_are_refused(tmp_path: Path) -> None:
    code = "from skipjoin.recipes import Settings, baselines, recipe\n"
    code += "@recipe\ndef one(s: Settings):\n    return baselines.fcfs(s)\n"
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(code)
    for twice, name in (
        ("fcfs,fcfs", "fcfs"),
        ("fastserve[paced=on,eviction=defer],fastserve[eviction=defer,paced=true]", "fastserve"),
        (f"{tmp_path}/a/mine.py:one,{tmp_path}/b/mine.py:one", "mine.py:one"),
    ):
        with pytest.raises(ConfigError, match=f"recipes must differ in results, but two are called {name}"):
            MACHINE.systems(twice)
    assert len(MACHINE.systems(f"fcfs,{tmp_path}/a/mine.py:one,fastserve[paced=on],fastserve[paced=off]")) == 4


def test_an_engine_keeps_the_brackets_of_a_file_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("x/mine.py:one[a=1, b=2]") == f"{tmp_path}/x/mine.py:one[a=1, b=2]"
    assert absolute("fastserve[paced=off]") == "fastserve[paced=off]"
    assert EngineConfig(recipe="bros[eviction=swap]").recipe == "bros[eviction=swap]"
    with pytest.raises(ConfigError, match=r"eviction is given twice: in recipe bros\[eviction=swap\] and separately"):
        EngineConfig(recipe="bros[eviction=swap]", recipe_params={"eviction": "share"})


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (
            "fastserve[eviction=recomputed]",
            "eviction must be one of proactive, .* got 'recomputed'; did you mean recom",
        ),
        ("fastserve[evicted=defer]", "there is no parameter 'evicted'; did you mean eviction?: fastserve has starv"),
        ("fcfs[chunk_tokens=8]", "recipe 'fcfs[chunk_tokens=8]': chunk_tokens needs recipe sarathi: fcfs has no param"),
        ("fastserve[eviction]", "recipe 'fastserve[eviction]': a parameter in brackets must be NAME=VALUE, got 'evict"),
        ("fastserve[paced=maybe]", "recipe 'fastserve[paced=maybe]': paced must be true or false, got 'maybe'"),
        ("fastserve[paced=on,paced=off]", "a parameter in brackets: paced is given twice"),
        ("fastserve[]", "a parameter is missing in 'fastserve[]': write NAME[PARAMETER=VALUE,...] or fastserve"),
        ("fastserve[paced=on,]", "a parameter is missing in 'fastserve[paced=on,]'"),
        ("fcfs,fastserve[paced=on,sarathi", "a bracket is not closed by ] in 'fastserve[paced=on,sarathi'"),
        ("fcfs,fastserve]", "a bracket is not opened by [ in 'fastserve'"),
        ("fastserve[paced=on]x", "recipe must be one of adaptive, alise, "),
        ("fastserv[paced=on]", "got 'fastserv'; did you mean fastserve?"),
        ("fcfs,", "recipe must be one of adaptive, alise, "),
        (
            "fastserve[eviction=defer,starvation_bound_s=9]",
            "starvation_bound_s must not be set together with eviction=defer",
        ),
    ],
)
def test_errors_of_names_say_which_part_is_wrong_and_the_remedy(names: str, error: str) -> None:
    pattern = error if ".*" in error else re.escape(error)
    with pytest.raises(ConfigError, match=pattern):
        MACHINE.systems(names)
