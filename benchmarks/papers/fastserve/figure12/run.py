"""FastServe figure 12: P95 normalized latency by rate in the runs of figure 11."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.fastserve.panels import STARTS, Searches, draw_panels, read_off
from papers.fastserve.setting import RECIPES, TAIL_BOUND, system
from papers.figures.report import main, settings_of
from papers.figures.runs import Options, Result, poisson, result_of, run_plans

# Parts of figure 11's records.
_FIELDS = ("recipe", "model", "workload", "normalized_latency_s")


def measure(options: Options) -> Result:
    records = result_of("figure11", options)["records"]
    searches = Searches(TAIL_BOUND, options)
    run_plans("figure12", searches.plans, options)
    systems = [system(recipe, batch_cap=cap) for cap in STARTS for recipe in RECIPES]
    return {
        "settings": settings_of(systems, [poisson("sharegpt")], options),
        "tables": [*searches.tables(), read_off(records, TAIL_BOUND)],
        "tried": searches.tried(),
        "records": [{name: record[name] for name in _FIELDS} for record in records],
    }


def draw(result: Result) -> Mapping[str, Figure]:
    return {"tail-latency.png": draw_panels(result["records"], "normalized_latency_s.p95", 0.3)}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("normalized_latency_s.p95",))
