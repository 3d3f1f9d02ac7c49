from __future__ import annotations

from pathlib import Path

import torch
from structured_output import run as benchmark
from structured_output.schemas import UNSUPPORTED, make_schemas

from random_model import make_byte_model


def test_each_schema_gives_a_valid_output_or_an_error_that_names_the_keyword(tmp_path: Path) -> None:
    make_byte_model(tmp_path, torch.float32, vocab=257, layers=1, hidden=64)
    refused = [{"type": "object", "properties": {"x": schema}, "required": ["x"]} for schema in UNSUPPORTED]
    found = benchmark.schemas(tmp_path, make_schemas(12, 1) + refused, seed=0)
    assert found["wrong"] == []
    assert found["valid"] > 6
    assert found["refused"] >= len(UNSUPPORTED)
    for keyword in ("not", "uniqueItems", "contains", "propertyNames", "look-around"):
        assert any(keyword in reason for reason in found["reasons"]), found["reasons"]
