from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from skipjoin.cli.class_table import number_text
from skipjoin.report.bound import MaximumRate
from skipjoin.report.numbers import duration, number


def test_durations() -> None:
    cases = {
        0.0: "0 s",
        4.56e-6: "4.56 µs",
        0.0009996: "1 ms",
        0.0123: "12.3 ms",
        0.9996: "1 s",
        0.999: "999 ms",
        1.0: "1 s",
        12.34: "12.3 s",
        999.6: "1,000 s",
        12345.6: "12,346 s",
    }
    assert {seconds: duration(seconds) for seconds in cases} == cases


@given(st.floats(0, 1e9))
def test_numbers_have_no_exponent_and_three_digits(value: float) -> None:
    rate = MaximumRate(value, at_least=False)
    for text in (number(value), number_text(value), str(rate), duration(value).split()[0]):
        assert re.fullmatch(r"[\d,]+(\.\d+)?", text), text
    if value > 1e-6:
        assert abs(float(number(value)) - value) <= 0.00501 * value
