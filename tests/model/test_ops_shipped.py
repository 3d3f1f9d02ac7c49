from __future__ import annotations

import platform
import shutil

import pytest

from skipjoin.model.ops import build
from skipjoin.model.ops.variants import VARIANTS

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
        assert build.shipped() == [wheel / one.file for one in variants[at:]]
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
