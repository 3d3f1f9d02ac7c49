from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.scripts import ROOT, load
from support.worlds import exhaustive

mutations = load("tools/mutations.py")


@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_mutations_change_code_and_name_existing_tests(name: str) -> None:
    mutation = mutations.MUTATIONS[name]
    before = (ROOT / "src" / "skipjoin" / mutation.path).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(mutations.mutated(mutation, ROOT))) != ast.dump(ast.parse(before))
    assert all((ROOT / "tests" / test).is_file() for test in mutation.tests)


def test_missing_source_text_is_reported_with_its_file(tmp_path: Path) -> None:
    mutation = mutations.MUTATIONS["planner"]._replace(old="if moon_is_full:")
    with pytest.raises(ValueError, match=r"plan\.py must have the text 'if moon_is_full:' exactly once, .* 0 times"):
        mutations.mutated(mutation, ROOT)


@pytest.mark.parametrize(("checked", "expected"), [("add(1, 2) == 3", True), exhaustive("add(0, 0) == 0", False)])
def test_mutation_is_caught_if_tests_fail(tmp_path: Path, checked: str, expected: bool) -> None:
    source = tmp_path / "src" / "skipjoin" / "sums.py"
    source.parent.mkdir(parents=True)
    (source.parent / "__init__.py").touch()
    source.write_text("def add(one, other):\n    return one + other\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(
        f"from skipjoin.sums import add\n\n\ndef test_sums():\n    assert {checked}\n"
    )
    mutation = mutations.Mutation("sums", "sums.py", "one + other", "one - other", ("test_sums.py",))
    was_caught, _ = mutations.is_caught(mutation, tmp_path)
    assert was_caught is expected
    if expected:  # otherwise the tests have just passed with the mutation
        assert mutations.run_tests(tmp_path, mutation.tests)[0] == mutations.PASSED
    assert source.read_text().endswith("one + other\n")
