from __future__ import annotations

from pathlib import Path
from typing import Any

from skipjoin.builtin import PACKAGED_SAMPLING, packaged_model_path
from skipjoin.model.errors import ModelError
from skipjoin.model.settings_files import read_settings
from skipjoin.sampling import ParameterError, SamplingParams, parameters_of

FILE = "generation_config.json"
# Fields that control sampling. Lengths and do_sample are up to the caller.
FIELDS = frozenset(name for name, row in parameters_of(SamplingParams).items() if row.parameter.is_of_model)


def sampling_defaults(folder: str | Path, generation_config: str = "auto") -> dict[str, Any]:
    if generation_config == "none":
        return {}
    given = read_settings(Path(folder), FILE, default={})
    if Path(folder) == packaged_model_path():
        given = PACKAGED_SAMPLING | given
    found = {name: value for name, value in given.items() if name in FIELDS and value is not None}
    try:
        params = SamplingParams(**found)
    except ParameterError as error:
        raise ModelError(
            f"{Path(folder) / FILE}: {error}; --generation-config none leaves the file's defaults out"
        ) from error
    return {name: getattr(params, name) for name in found}
