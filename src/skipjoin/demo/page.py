from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jinja2 import Environment
from markupsafe import Markup

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


class Cells(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(headline: str, verdict: str, svg: str, tables: Sequence[Cells], conditions: Sequence[str]) -> str:
    # Our own picture, whose texts matplotlib escapes, without the XML declaration.
    picture = Markup(svg[svg.index("<svg") :])
    template = Environment(autoescape=True).from_string(_TEMPLATE)
    return template.render(headline=headline, verdict=verdict, picture=picture, tables=tables, conditions=conditions)
