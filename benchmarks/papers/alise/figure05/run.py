"""ALISE figure 5: prefill and decode time by length, and the linear model of execution time (equations 3 to 5)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.alise.setting import V100
from papers.figures.pictures import legend_of
from papers.figures.report import main, table
from papers.figures.runs import Options, Result
from papers.figures.variants import plain
from skipjoin.core.step import StepShape
from skipjoin.policies.execution import ExecutionTime
from skipjoin.report.plots import style

MODELS = ("opt-2.7b", "opt-6.7b", "opt-13b")
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)


def measure(options: Options) -> Result:
    times, fits = [], []
    for model in MODELS:
        cost = plain("fcfs")[0].on(V100[model]).cost
        fitted = ExecutionTime(cost)
        for tokens in LENGTHS:
            prefill = cost.step(StepShape(prefill=tokens, attention=tokens * (tokens + 1) // 2))
            decode = cost.step(StepShape(decodes=1, context=tokens))
            both = (prefill, fitted.prefill(tokens), decode, fitted.decode(tokens))
            times.append((model, tokens, *(1e3 * seconds for seconds in both)))
        coefficients = (1e3 * seconds for seconds in (fitted.t0, fitted.alpha, fitted.beta))
        fits.append((model, *coefficients, *fitted.quality))
    return {
        "settings": {"case": "One request alone on a V100 with 32 GB, from the cost model"},
        "tables": [
            table(
                "Times by length",
                ("model", "tokens", "prefill, ms", "by the model", "decode, ms", "by the model"),
                times,
            ),
            table(
                "The regression T(s, n) = T0 s + n (alpha s + beta)",
                ("model", "T0, ms", "alpha, ms", "beta, ms", "R2 of prefill", "R2 of decode"),
                fits,
            ),
        ],
    }


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 2.8)
    panels = figure.subplots(1, 2)
    for axes, (place, title) in zip(panels, ((2, "prefill"), (4, "decode")), strict=True):
        for number, model in enumerate(MODELS):
            rows = [row for row in result["tables"][0]["rows"] if row[0] == model]
            shape = style.look(number)
            lengths = [row[1] for row in rows]
            axes.plot(lengths, [row[place] for row in rows], shape.marker, color=shape.color, label=model)
            axes.plot(lengths, [row[place + 1] for row in rows], color=shape.color, linestyle=shape.dash, lw=1)
        axes.set(title=title, xlabel="tokens of context", ylabel="time (ms)", ylim=(0, None))
    legend_of(figure, panels[0])
    return {"times.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
