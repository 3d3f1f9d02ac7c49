from __future__ import annotations

import json
from pathlib import Path

import pytest

from papers.run_all import NAMES
from support.figures import BENCHMARKS, assert_documented, assert_tables_are_current

# Folders of scripts that do not use the simulator, or take hours.
OTHERS = {
    "alise": {"engine", "server", "trained", "constants", "table2"},
    "bros": {"engine"},
    "econoserve": {"engine"},
    "fastserve": {"engine", "link"},
}
# Fields of a system in settings, which some records have as well.
DECIDING = ("kv_blocks", "cpu_blocks", "swap_dtype", "max_num_seqs", "block_size", "max_tokens")


@pytest.mark.parametrize("paper", NAMES)
def test_every_figure_has_a_readme_with_its_command(paper: str) -> None:
    folders = {path.parent.name for path in (BENCHMARKS / "papers" / paper).glob("*/run.py")}
    assert folders == {*NAMES[paper], *OTHERS[paper]}
    assert_documented(paper, NAMES[paper])


@pytest.mark.parametrize(("paper", "name"), [(paper, name) for paper, names in NAMES.items() for name in names])
def test_records_are_whole_and_agree_with_settings_and_readmes(paper: str, name: str, tmp_path: Path) -> None:
    result = json.loads((BENCHMARKS / "papers" / paper / name / "result.json").read_text(encoding="utf-8"))
    assert (result["figure"], result["quick"]) == (name, False)
    assert_tables_are_current(paper, name, result, tmp_path)
    settings = result["settings"]
    systems = [(recipe, system) for system in settings.get("systems", {}).values() for recipe in system["recipes"]]
    if paper == "bros":
        assert all(text.startswith("trace:cal_") for text in settings["lengths"])
    for record in result["records"]:
        assert record.get("real_time", {}).get("requests", {}).get("unfinished", 0) == 0
        # Figures that read another one's records have parts of them, and recipes of a figure's own file have no label.
        if "recipe" in record and ".py:" not in record["recipe"]:
            predicted = record.get("prediction", {}).get("predictor")
            labels = {record["recipe"], f"{record['recipe']} {predicted}"}
            found = record.get("settings", {})
            given = {field: found[field] for field in DECIDING if field in found}
            assert any(recipe in labels and given.items() <= one.items() for recipe, one in systems)
