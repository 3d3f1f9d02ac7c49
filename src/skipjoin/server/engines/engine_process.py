"""Engine process: `python -m skipjoin.server.engines.engine_process < setup.json`."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from skipjoin.server.engines.engine_server import OnProgress, serve_engine
from skipjoin.server.engines.messages import Ready, Setup
from skipjoin.system.garbage import without_garbage_collection

if TYPE_CHECKING:
    from skipjoin.engine.loop import EngineLoop

logger = logging.getLogger("skipjoin.engine")
# Fields of `Ready` that are not fields of the engine's `info`.
_OTHER_FACTS = {"cost", "caches_prefixes", "max_num_seqs", "max_num_batched_tokens", "recipe_path", "recipe_params"}


def load_engine(setup: Setup, on_progress: OnProgress) -> tuple[EngineLoop, Ready]:
    # Collections would visit the many objects that importing torch creates for good.
    with without_garbage_collection():
        from skipjoin.engine.build import assemble  # noqa: PLC0415
        from skipjoin.engine.loop import EngineLoop  # noqa: PLC0415

    engine = assemble(setup.config, on_progress)
    if engine.info.notice:
        logger.info("%s", engine.info.notice)
    facts = {name: getattr(engine.info, name) for name in Ready.__struct_fields__ if name not in _OTHER_FACTS}
    ready = Ready(
        **facts,
        cost=engine.info.cost.current,
        caches_prefixes=engine.caches_prefixes,
        max_num_seqs=setup.config.max_num_seqs,
        max_num_batched_tokens=setup.config.max_num_batched_tokens,
        recipe_path=setup.config.recipe,
        recipe_params=setup.config.recipe_params,
    )
    return EngineLoop(engine), ready


if __name__ == "__main__":
    sys.exit(serve_engine(load_engine))
