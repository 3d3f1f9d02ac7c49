"""Choice of a model's output format."""

from __future__ import annotations

from skipjoin.formats.prompted import prompted_format
from skipjoin.formats.table import OutputFormat, find_format


def choose_format(template: str, *, knows_tools: bool, tool_format: str = "auto") -> OutputFormat | None:
    """Return the format of a model, or None if it has neither reasoning nor calls of a known format.

    Args:
        template: The model's chat template.
        knows_tools: The template writes tools.
        tool_format: "auto" for that of the template, "json" for a prompted one where that is missing.
    """
    found = find_format(template)
    has_calls = knows_tools and found is not None and found.calls is not None
    return prompted_format(found) if tool_format == "json" and not has_calls else found
