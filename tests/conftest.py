"""What all tests share: the helpers in `support`, and a hypothesis profile that gives the same examples every time."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("stable", derandomize=True, deadline=None)
settings.load_profile("stable")
