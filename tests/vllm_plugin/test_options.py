"""Options, refusals and request options of the scheduler, without vLLM."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from skipjoin.core.request import ServiceClass
from skipjoin.options import ConfigError
from skipjoin.vllm.compat import (
    METHODS,
    REFUSED,
    TESTED,
    Call,
    Uses,
    Value,
    check_attributes,
    check_features,
    check_kv_groups,
)
from skipjoin.vllm.options import read_options
from skipjoin.vllm.plugin import check_config
from skipjoin.vllm.requests import read_options as read_request_options

TIER = SimpleNamespace(kv_connector="CpuTier", kv_connector_module_path="skipjoin.vllm", kv_connector_extra_config={})


def config(additional: Any = None, **changes: Any) -> Any:
    """Return what the checks read of a `VllmConfig`, with changes such as `model_config__runner_type`."""
    made = SimpleNamespace(
        additional_config=additional or {},
        speculative_config=None,
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1, data_parallel_size=2),
        scheduler_config=SimpleNamespace(scheduler_cls="skipjoin.vllm.Scheduler", watermark=0.0),
        model_config=SimpleNamespace(is_encoder_decoder=False, is_moe=False, runner_type="generate"),
    )
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner = made
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipe": "fastserv"}, r"got 'fastserv'; did you mean fastserve"),
        ({"recepe": "fcfs"}, r"there is no 'recepe'; did you mean recipe"),
        (
            {"recipe": "fastserve", "params": {"starvation": 1}},
            r"there is no parameter 'starvation'; did you mean starvation_s",
        ),
        ({"recipe": "bros", "params": {"ttft_s": -1}}, r"ttft_s must be in \(0, 1e\+06\], got -1"),
        ({"recipe": "srpt"}, r"recipe srpt needs true output lengths"),
        ({"slo_s": "fast"}, r"slo_s must be a number, got 'fast'"),
        ({"params": 3}, r"skipjoin.params must be an object, got 3"),
        ({"metrics_port": 0}, r"metrics_port must be in \[1, 65535\], got 0"),
        ({"recipe": "alise", "forecast_encoder": "embeddings"}, r"forecast_encoder must be hashed inside vLLM"),
        ("fcfs", r"skipjoin must be an object, got 'fcfs'"),
    ],
)
def test_a_wrong_option_is_an_error_of_one_line_before_the_model_loads(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        check_config(config({"skipjoin": given}))
    assert "\n" not in str(found.value)


def test_forecasts_are_made_for_recipes_that_read_them() -> None:
    assert read_options({"skipjoin": {"recipe": "fastserve"}}).forecasts is None
    assert read_options({"skipjoin": {"recipe": "alise"}}).forecasts is not None
    assert read_options({"skipjoin": {"recipe": "alise", "forecaster": "none"}}).forecasts is None
    assert read_options({"skipjoin": {"recipe": "fcfs", "forecaster": "prior"}}).forecasts is not None


@pytest.mark.parametrize(
    "change",
    [
        {"parallel_config__pipeline_parallel_size": 2},
        {"parallel_config__decode_context_parallel_size": 2},
        {"kv_transfer_config": SimpleNamespace(kv_connector="Other", kv_connector_module_path=None)},
        {"ec_transfer_config": object()},
        {"speculative_config": SimpleNamespace(method="eagle")},
        {"speculative_config": SimpleNamespace(method="ngram"), "kv_transfer_config": TIER},
        {"model_config__has_inner_state": True, "kv_transfer_config": TIER},
        {"model_config__has_inner_state": True, "speculative_config": SimpleNamespace(method="ngram")},
        {"model_config__is_encoder_decoder": True},
        {"model_config__runner_type": "pooling"},
        {"model_config__is_diffusion": True},
        {"model_config__is_moe": True},
        {"attention_config": SimpleNamespace(hisparse_config=object())},
        {"aux_output_config": SimpleNamespace(enabled=True)},
        {"scheduler_config__watermark": 0.1},
        {"scheduler_config__prefill_schedule_interval": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_unproven_feature_is_refused_with_its_flag(change: dict[str, Any]) -> None:
    check_features(config())
    with pytest.raises(ConfigError, match="does not support") as found:
        check_config(config(**change))
    assert any(feature.flag in str(found.value) for feature in REFUSED)
    assert "\n" not in str(found.value)


def test_other_schedulers_are_not_checked() -> None:
    for other in (None, "vllm.v1.core.sched.scheduler.Scheduler", dict):
        check_config(config({"skipjoin": 3}, scheduler_config__scheduler_cls=other))


def test_missing_attributes_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"vLLM 9\.9 lacks .*schedule.*_handle_blocked_waiting_request or _try"):
        check_attributes(object(), METHODS, "9.9")


class Pool:
    num_gpu_blocks = 9

    def get_num_free_blocks(self) -> int:
        return 3

    @staticmethod
    def is_free(block: int) -> bool:
        return block > 0


USES: Uses = {"get_num_free_blocks": Call(), "is_free": Call(1), "other|num_gpu_blocks": Value((int,))}


@pytest.mark.parametrize("owner", [Pool, Pool()], ids=["class", "instance"])
def test_attributes_of_the_expected_form_are_accepted(owner: Any) -> None:
    check_attributes(owner, USES, "9.9")


@pytest.mark.parametrize("owner", [Pool, Pool()], ids=["class", "instance"])
@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            {"num_gpu_blocks": Value((set, dict))},
            "in vLLM 9.9, num_gpu_blocks is of type int instead of set or dict,",
        ),
        ({"num_gpu_blocks": Call(1)}, "num_gpu_blocks is of type int instead of a method"),
        ({"get_num_free_blocks": Call(2)}, r"get_num_free_blocks takes \(\) -> '?int'? instead of \(\.\.\., \.\.\.\)"),
        ({"is_free": Call(1, ("now",))}, r"is_free takes .* instead of \(\.\.\., now=\.\.\.\)"),
        ({"gone": Call(), "num_gpu_blocks": Call()}, "vLLM 9.9 lacks gone; in vLLM 9.9, num_gpu_blocks is"),
    ],
)
def test_attributes_of_another_form_are_refused_with_both_forms(owner: Any, use: Uses, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{message}.*the Skipjoin scheduler uses: install one of 0\.27\.1"):
        check_attributes(owner, use, "9.9")


def test_supported_releases_are_those_of_the_extra() -> None:
    """The extra has no release that is older than the oldest or newer than the newest tested one."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = map(Requirement, project["optional-dependencies"]["vllm"])
    assert all(version in requirement.specifier for version in TESTED)
    oldest, newest = (tuple(map(int, version.split("."))) for version in (TESTED[0], TESTED[-1]))
    assert f"{oldest[0]}.{oldest[1]}.{oldest[2] - 1}" not in requirement.specifier
    assert f"{newest[0]}.{newest[1] + 1}.0" not in requirement.specifier


def groups_of(*kinds: str) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=type(kind, (), {})()) for kind in kinds])


@pytest.mark.parametrize(
    ("groups", "tier", "message"),
    [
        (groups_of(), False, "got none: choose another model"),
        (groups_of("FullAttentionSpec", "CircularBufferSpec"), False, "got CircularBufferSpec, FullAttentionSpec"),
        (groups_of("SlidingWindowSpec"), True, r"CpuTier needs one .* got 1 \(SlidingWindowSpec\)"),
        (groups_of("FullAttentionSpec", "FullAttentionSpec"), True, "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_an_unproven_kv_cache_is_refused(groups: Any, tier: bool, message: str) -> None:
    check_kv_groups(groups_of("FullAttentionSpec", "SlidingWindowSpec", "MambaSpec"), has_tier=False)
    with pytest.raises(ConfigError, match=message):
        check_kv_groups(groups, has_tier=tier)


def test_request_options_come_from_vllm_xargs() -> None:
    given = {"slo_ttft_ms": 250, "slo_jct_ms": "1e4", "service_tier": "flex", "program_id": "p"}
    found = read_request_options(given, priority=-2)
    assert found.client == "p"
    assert found.target == (0.25, math.inf, 10.0)
    assert (found.service, found.is_urgent, found.priority) == (ServiceClass.BEST_EFFORT, False, -2)
    assert read_request_options({"service_tier": "priority"}).is_urgent


@pytest.mark.parametrize("value", [0, -1, "soon", True, [3], math.nan, math.inf, "9" * 400])
def test_an_invalid_objective_is_ignored_with_a_warning(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert (
        read_request_options({"slo_tpot_ms": value, "service_tier": "gold", "program_id": 7}).target.tpot_s == math.inf
    )
    assert "program_id must be a text" in caplog.text
    assert "slo_tpot_ms must be a number above 0" in caplog.text
    assert "service_tier must be one of" in caplog.text
