"""BROS figure 11: attainment of 0.4 s to the first token and 0.2 s per further token.

The runs are those of figure 10, read from its result.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.bros.setting import COMPARED, DATASETS, NOISY, TPOT_KEPT, TTFT_KEPT, against_rate, side_by_side, value_of
from papers.figures.report import main, table
from papers.figures.runs import Options, Result, pick, result_of
from skipjoin.observe.record import Record

NAMES = [variant.name for variant in (*COMPARED, NOISY)]


def measure(options: Options) -> Result:
    found = result_of("figure10", options)
    kept = ("model", "lengths", "variant", "workload")
    records = [
        {part: record[part] for part in kept} | {"real_time": {"slo": record["real_time"]["slo"]}}
        for record in found["records"]
    ]
    keys = ("lengths", "model", "rate_rps")
    return {
        "settings": found["settings"],
        "tables": [
            summary(records),
            side_by_side("TTFT within 0.4 s, share of the real-time requests", records, keys, TTFT_KEPT),
            side_by_side("TPOT within 0.2 s, share of the real-time requests", records, keys, TPOT_KEPT),
        ],
        "records": records,
    }


def summary(records: Sequence[Record]) -> Result:
    """Return means over rates and models."""
    rows = [
        (lengths, name, *(fmean(value_of(record, field) for record in some) for field in (TTFT_KEPT, TPOT_KEPT)))
        for lengths in DATASETS
        for name in NAMES
        if (some := pick(records, lengths=lengths, variant=name))
    ]
    return table("Means over rates and models", ("lengths", "variant", "TTFT kept", "TPOT kept"), rows)


def draw(result: Result) -> Mapping[str, Figure]:
    fields = {"TTFT within 0.4 s": TTFT_KEPT, "TPOT within 0.2 s": TPOT_KEPT}
    return {f"{name}.png": against_rate(pick(result["records"], lengths=name), fields, NAMES) for name in DATASETS}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=(TTFT_KEPT, TPOT_KEPT))
