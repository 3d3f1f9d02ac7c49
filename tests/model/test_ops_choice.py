"""The permanent choice of the fastest product implementation for a weight, over all numbers of rows."""

from __future__ import annotations

import logging
import platform
import shutil

import pytest

from skipjoin.model.ops import build
from skipjoin.model.ops.choice import ROWS, Choices, fastest
from skipjoin.model.ops.variants import VARIANTS

BOTH = VECTORS, TILES = "vectors", "tiles"


def never(way: str, rows: int) -> float:
    raise AssertionError("measured again")


def taking(vectors: float, tiles: float):
    return lambda way, rows: vectors if way == VECTORS else tiles


def test_the_minimum_product_of_times_wins():
    many = {(VECTORS, ROWS[0]): 1.0, (TILES, ROWS[0]): 1.5}  # tiles lose with one row and win by more with others
    assert fastest(BOTH, lambda way, rows: many.get((way, rows), 2.0 if way == VECTORS else 1.5)) == TILES
    assert fastest(BOTH, taking(1.0, 1.01)) == VECTORS
    slow = iter([9.0, 1.0])  # the first run was disturbed
    assert fastest(BOTH, lambda way, rows: 1.5 if way == TILES else next(slow, 1.0)) == VECTORS


def test_choices_are_saved_and_measured_again_after_damage(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Choices("amx-1").way("a", BOTH, taking(2.0, 1.0)) == TILES
    others = Choices("amx-1")
    assert (others.way("a", BOTH, never), others.way("b", BOTH, taking(1.0, 2.0))) == (TILES, VECTORS)
    assert [Choices("amx-1").way(shape, BOTH, never) for shape in "ab"] == [TILES, VECTORS]
    assert Choices("amx-2").way("a", BOTH, taking(1.0, 2.0)) == VECTORS  # for another library
    (file,) = (tmp_path / "skipjoin").glob("*amx-1.json")
    file.write_bytes(file.read_bytes().replace(b"tiles", b"tales"))
    with caplog.at_level(logging.WARNING):
        assert Choices("amx-1").way("a", BOTH, taking(1.0, 2.0)) == VECTORS
    assert "products-amx-1.json is damaged" in caplog.text
    assert Choices("amx-1").way("a", BOTH, never) == VECTORS


def test_choices_hold_in_processes_that_cannot_write(tmp_path, monkeypatch, caplog):
    (tmp_path / "skipjoin").write_text("a file in place of the folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choices = Choices("amx")
    with caplog.at_level(logging.WARNING):
        assert choices.way("a", BOTH, taking(2.0, 1.0)) == TILES
    assert choices.way("a", BOTH, never) == TILES
    (warning,) = caplog.messages
    assert "cannot be written: the next start measures the ways to multiply again" in warning


LIBRARY = build.load_library()


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """Return the folder of a wheel with all libraries, in which the compiler must not run."""
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    monkeypatch.setattr(build, "compiled_library", lambda target: pytest.fail("the sources were compiled"))
    for variants in VARIANTS.values():
        for variant in variants:
            (tmp_path / variant.file).touch()
    return tmp_path


@pytest.mark.parametrize("machine", list(VARIANTS))
def test_variants_that_the_processor_supports_are_tried_fastest_first(machine, wheel, monkeypatch):
    variants = VARIANTS[machine]
    monkeypatch.setattr(platform, "machine", lambda: machine)
    for at, variant in enumerate(variants):
        monkeypatch.setattr(build, "cpu_features", lambda needs=variant.needs: needs)
        assert build.shipped() == [wheel / variant.file for variant in variants[at:]]
    # A feature that a variant needs is missing, as on processors with AVX-512 but without its vector lengths.
    for variant in variants[:-1]:
        for feature in variant.needs:
            monkeypatch.setattr(build, "cpu_features", lambda needs=variant.needs - {feature}: needs)
            assert wheel / variant.file not in build.shipped()


def test_processors_without_variants_compile_the_sources(wheel, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert build.shipped() == []
    assert [find.func for find in build._sources_of_libraries()] == [build.compiled_library] * len(build._targets())


@pytest.mark.skipif(LIBRARY is None, reason="no compiler")
def test_damaged_library_falls_back_to_the_next_variant(wheel, monkeypatch, caplog):
    path = build.path_of(LIBRARY)
    names = [wheel / f"ops-{name}.so" for name in ("broken", path)]
    names[0].write_bytes(b"not a library")
    shutil.copy(LIBRARY._name, names[1])
    monkeypatch.setattr(build, "shipped", lambda: names)
    build.say_once.cache_clear()
    assert [build.path_of(library) for library in build.libraries()] == [path]
    (message,) = caplog.messages
    assert message.startswith(f"compiled CPU operations for {path} are used, which are not the fastest")
