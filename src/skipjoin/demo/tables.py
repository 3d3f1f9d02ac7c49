from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jinja2 import Environment
from markupsafe import Markup

from skipjoin.demo.load import MixedLoad
from skipjoin.demo.outcome import Outcome

_TEMPLATE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Skipjoin demo</title>
<style>
  :root { color-scheme: light dark; }
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
  table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; }
  th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8886; }
  th:first-child, td:first-child { text-align: left; }
  figure { margin: 1rem 0; background: #fff; padding: .5rem; }
  figure svg { width: 100%; height: auto; }
</style>
<h1>Skipjoin demo</h1>
<p><strong>{{ headline }}.</strong></p>
<p>{{ verdict }}</p>
<figure role="img" aria-label="The life of every request, one panel per system">{{ picture }}</figure>
{% for table in tables %}
<h2>{{ table.title }}</h2>
<table>
<thead><tr>{% for cell in table.columns %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table>
{% endfor %}
<h2>Conditions</h2>
<ul>
{% for line in conditions %}<li>{{ line }}</li>
{% endfor %}</ul>
</html>
"""
_COLUMNS = (
    "system",
    "chat TTFT p50 s",
    "p95 s",
    "chat TPOT ms",
    "background done s",
    "tokens/s",
    "preempted",
    "failed",
)
_NONE = "-"


class Cells(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(headline: str, verdict: str, svg: str, tables: Sequence[Cells], conditions: Sequence[str]) -> str:
    # Our own picture, whose texts matplotlib escapes, without the XML declaration.
    picture = Markup(svg[svg.index("<svg") :])
    template = Environment(autoescape=True).from_string(_TEMPLATE)
    return template.render(headline=headline, verdict=verdict, picture=picture, tables=tables, conditions=conditions)


def figures_table(outcomes: Sequence[Outcome]) -> Cells:
    return Cells("Figures", _COLUMNS, [_figures(outcome) for outcome in outcomes])


def waits_table(outcomes: Sequence[Outcome]) -> Cells | None:
    known = [outcome for outcome in outcomes if outcome.counts.waits is not None]
    reasons = list(dict.fromkeys(reason for item in known for reason in item.waits))
    if not reasons:
        return None
    rows = [[item.name, *(_text(item.waits.get(reason, 0.0)) for reason in reasons)] for item in known]
    columns = ["system", *(reason.replace("_", " ") for reason in reasons)]
    return Cells("Seconds that requests waited, by reason", columns, rows)


def conditions(load: MixedLoad, outcomes: Sequence[Outcome], command: str) -> list[str]:
    machine = outcomes[0].record["machine"]
    own = next((outcome for outcome in outcomes if outcome.slots is not None), None)
    model = "" if own is None else f"A random-weight Llama of 97.5M parameters in bfloat16, a batch of {own.slots}. "
    busy = machine["load_1min"] > 1.5 * (machine["cores"] or 1)  # the server and this client keep all cores busy
    return [
        f"{model}{load.background} background jobs of {load.background_tokens} tokens at the start, and {load.chats} "
        f"chats within {load.duration_s:.0f} s. One run each, so read the figures as a shape.",
        f"{machine['cpu'] or 'unknown CPU'}, {machine['cores']} cores, load {machine['load_1min']:.1f}"
        + (": other programs were running, which slows all systems." if busy else "."),
        *(
            ["The peer runs its own model with its own limits."]
            if any(outcome.slots is None for outcome in outcomes)
            else []
        ),
        f"Skipjoin {outcomes[0].record['version']}: {command}",
    ]


def _figures(outcome: Outcome) -> list[str]:
    chat = outcome.chat
    tpot_s = chat["tpot_s"]["mean"]
    return [
        outcome.name,
        _text(chat["ttft_s"]["p50"]),
        _text(chat["ttft_s"]["p95"]),
        _text(None if tpot_s is None else tpot_s * 1000),
        _text(outcome.background_s),
        _text(outcome.record["throughput_tps"]),
        _NONE if outcome.counts.preemptions is None else f"{outcome.counts.preemptions:.0f}",
        str(outcome.failed),
    ]


def _text(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
