"""FastServe figure 13: P95 goodput, the largest rate at which 95 % of the requests meet their objectives."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.fastserve.setting import system
from papers.figures.pictures import bars, colors_of, legend_of
from papers.figures.report import main, ratio_of, settings_of, table
from papers.figures.runs import Options, Result, Search, cells, poisson, run_plans
from skipjoin.core.policy import CostModel
from skipjoin.core.step import StepShape
from skipjoin.observe.record import Slo
from skipjoin.report.plots import style

# Static batches are left out, because they meet these objectives only at negligible rates.
RECIPES, SCALES = ("fcfs", "fastserve", "srpt"), (5.0, 10.0, 20.0)
BOUND = "slo.all_attained>=0.95"
STARTS = {"fcfs": 2.0, "fastserve": 2.8, "srpt": 2.4}
MEAN_LENGTHS, MEAN_TIMES = "request of mean lengths", "mean over requests"
# Number of requests for the mean of the second reading.
_DRAWN = 5000


def phases(cost: CostModel, prompt: int, output: float) -> tuple[float, float]:
    """Return the seconds of the prefill and of the middle decode step of a single request."""
    prefill = StepShape(prefill=prompt, attention=prompt * (prompt + 1) // 2)
    return cost.step(prefill), cost.step(StepShape(decodes=1, context=round(prompt + output / 2)))


def light_load(cost: CostModel) -> dict[str, tuple[float, float]]:
    """Return the seconds of the phases under light load by reading, which are the same at every rate."""
    workload = poisson("sharegpt")
    prompt, output = workload.streams[0].lengths.mean()
    drawn = [phases(cost, job.prompt_tokens, job.output_tokens) for job in workload.draw(1.0, None, 0, _DRAWN)]
    return {
        MEAN_LENGTHS: phases(cost, round(prompt), output),
        MEAN_TIMES: (fmean(prefill for prefill, _ in drawn), fmean(decode for _, decode in drawn)),
    }


def measure(options: Options) -> Result:
    workload, systems = poisson("sharegpt"), {recipe: system(recipe) for recipe in RECIPES}
    light = light_load(systems["fcfs"].cost)
    slos = {
        (reading, scale): Slo(ttft_s=scale * prefill, tpot_s=scale * decode)
        for reading, (prefill, decode) in light.items()
        for scale in SCALES
    }
    searches = {
        (*key, recipe): Search(cells(systems[recipe], workload, [STARTS[recipe]], options, slo=slo), BOUND)
        for key, slo in slos.items()
        for recipe in RECIPES
    }
    run_plans("figure13", list(searches.values()), options)
    rows = []
    for (reading, scale, recipe), search in searches.items():
        slo, found = slos[reading, scale], search.rate
        ratios = [ratio_of(found, searches[reading, scale, other].rate) for other in ("fcfs", "srpt")]
        rows.append((reading, scale, slo.ttft_s, slo.tpot_s, recipe, found.rate_rps if found else None, *ratios))
    columns = ("light load", "scale", "TTFT <= s", "TPOT <= s", "recipe", "P95 goodput req/s", "to fcfs", "to srpt")
    return {
        "settings": settings_of(list(systems.values()), [workload], options),
        "tables": [table(f"Largest rate with {BOUND}", columns, rows)],
        "tried": {", ".join(map(str, key)): search.tried() for key, search in searches.items()},
    }


def draw(result: Result) -> Mapping[str, Figure]:
    rates = {(row[0], row[1], row[4]): row[5] or 0.0 for row in result["tables"][0]["rows"]}
    figure = style.new_figure(style.WIDE_IN, 3.2)
    panels = figure.subplots(1, 2, sharey=True)
    for reading, axes in zip((MEAN_LENGTHS, MEAN_TIMES), panels, strict=True):
        series = {recipe: [rates[reading, scale, recipe] for scale in SCALES] for recipe in RECIPES}
        bars(axes, [f"{scale:g}x" for scale in SCALES], series, colors_of(RECIPES))
        axes.set(xlabel="objectives, times light load", title=f"light load: {reading}")
    panels[0].set_ylabel("P95 goodput (req/s)")
    legend_of(figure, panels[0])
    return {"goodput.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
