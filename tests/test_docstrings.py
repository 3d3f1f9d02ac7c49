from __future__ import annotations

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["llm", "async_llm", "sampling", "structured_output", "policy", "sim.driver"])
def test_examples_print_what_they_show(name: str) -> None:
    failed, attempted = doctest.testmod(import_module(f"skipjoin.{name}"))
    assert attempted > 0
    assert failed == 0
