from __future__ import annotations

from rich.text import Text

from skipjoin.cli.explain import _policy


def heading(prefill_s: float | None) -> str:
    facts = [] if prefill_s is None else [{"label": "prefill ahead", "value": prefill_s, "unit": "s", "meaning": ""}]
    lines = _policy({"place": 2, "live_requests": 9, "facts": facts})
    return next(line.plain for line in lines if isinstance(line, Text) and line.plain)


def test_the_prefill_ahead_of_a_request_is_said_in_words() -> None:
    first = "Number 3 of 9 live requests in the scheduler's order."
    assert heading(3.1).endswith(f"{first} At least 3.1 s of prefill ahead of you.")
    assert heading(0.0).endswith("order.")
    assert heading(None).endswith("order.")
