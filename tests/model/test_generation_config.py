from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skipjoin.model.config import ModelError
from skipjoin.model.generation_config import sampling_defaults


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_sampling_defaults_are_read_unless_none(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    write(tmp_path, eos_token_id=7, do_sample=False, max_new_tokens=2048, min_p=None, **sampling)
    assert sampling_defaults(tmp_path) == sampling
    assert sampling_defaults(tmp_path, "none") == {}
    assert sampling_defaults(write(tmp_path, top_k=-1)) == {"top_k": 0}


@pytest.mark.parametrize("values", [{"temperature": 2.5}, {"top_k": "all"}, {"top_p": 0}, {"repetition_penalty": True}])
def test_invalid_values_name_file_field_and_remedy(tmp_path: Path, values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ModelError, match=rf"generation_config.json: {name} must be .*--generation-config none"):
        sampling_defaults(write(tmp_path, **values))
