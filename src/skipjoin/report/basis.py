from __future__ import annotations

from skipjoin.report.results import Record


def basis_text(record: Record) -> str:
    """Return the source of a simulation's costs and their error against measurements; empty for a measurement."""
    if record["driver"] != "simulator":
        return ""
    basis = record.get("basis")
    machine = f"{record['model']} on {record['hardware']}"
    if not basis:  # written by another program or an older version
        return f"simulated {machine}"
    if basis["profile"] is None:
        return f"simulated {machine}: costs computed from its data sheet, which no measurement has confirmed"
    median, p95 = (f"{100 * basis[name]:.0f} %" for name in ("error_median", "error_p95"))
    return (
        f"simulated {machine}: costs of the profile {basis['profile']} of {basis['date'][:10]}, whose error was "
        f"{median} (median) and {p95} (P95)"
    )
