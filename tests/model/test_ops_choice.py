"""The permanent choice of the fastest product implementation for a weight, over all numbers of rows."""

from __future__ import annotations

import logging

from skipjoin.model.ops.choice import ROWS, Choices, fastest

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
