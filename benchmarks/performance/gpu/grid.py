"""Search for the last place of a grid where a bound holds."""

from __future__ import annotations

from collections.abc import Mapping

# Maximum distance from the first place.
FAR = 24


def next_place(tried: Mapping[int, bool], begin: int) -> int | None:
    """Return the next place to measure, or None if the search is finished or too far from its beginning.

    Args:
        tried: Whether the bound held, by place.
    """
    if not tried:
        return begin
    holds = [place for place, held in tried.items() if held]
    breaks = [place for place, held in tried.items() if not held]
    # A bound that holds again above where it broke changes nothing.
    low = max((place for place in holds if not breaks or place < min(breaks)), default=None)
    if not breaks:
        place = max(holds) + _leap(len(tried))
    elif low is None:
        place = min(breaks) - _leap(len(tried))
    elif min(breaks) - low > 1:
        place = (low + min(breaks)) // 2
    else:
        return None
    return place if abs(place - begin) <= FAR else None


def _leap(tries: int) -> int:
    """Return the step, which doubles with every try up to 8."""
    return 1 << min(tries - 1, 3)
