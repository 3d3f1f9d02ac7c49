from __future__ import annotations

import logging
from typing import Any

from skipjoin.formats.declared import UnknownTemplateError, declared_format
from skipjoin.formats.prompted import prompted_format
from skipjoin.formats.table import OutputFormat, find_format

logger = logging.getLogger(__name__)


def choose_format(
    template: str, *, knows_tools: bool, declared: Any = None, tool_format: str = "auto"
) -> OutputFormat | None:
    """Return the format of a model, or None if it has neither reasoning nor calls of a known format.

    Args:
        knows_tools: Whether the template writes tools.
        declared: The model's own response template, which precedes the table of formats.
        tool_format: "auto" for that of the template, "json" for a prompted one where that is missing.
    """
    found = find_format(template)
    if declared is not None:
        try:
            found = declared_format(declared, found)
        except UnknownTemplateError as error:
            used = "reasoning and calls are not read" if found is None else f"the format {found.name} is used"
            logger.warning("%s of the model's response_template is not understood: %s", error, used)
    has_calls = knows_tools and found is not None and found.calls is not None
    return prompted_format(found) if tool_format == "json" and not has_calls else found
