from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def resume_garbage_collection() -> None:
    """Collect once, and make what remains permanent, so that later collections need not visit it."""
    gc.collect()
    gc.freeze()
    gc.enable()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
