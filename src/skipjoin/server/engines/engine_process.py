"""The engine process: assembles the engine and serves it to the API process, its parent.

    python -m skipjoin.server.engines.engine_process < setup.json

It ends on request, when the engine fails, and when its parent has ended.
"""

from __future__ import annotations

import sys

from skipjoin.engine.build import assemble
from skipjoin.engine.loop import EngineLoop
from skipjoin.server.engines.engine_server import Loop, OnProgress, serve_engine
from skipjoin.server.engines.messages import Ready, Setup


def load_engine(setup: Setup, on_progress: OnProgress) -> tuple[Loop, Ready]:
    """The engine and its description."""
    engine = assemble(setup.config, on_progress)
    if (bound := setup.config.starvation_bound_s) is not None:
        # The parent passes standard output on to the operator.
        print(
            f"No request goes {bound:g} s without running: a request that has not run for "
            f"{engine.info.starvation_s:.4g} s is promoted, "
            f"with at most {setup.config.max_live_requests} requests in the server",
            flush=True,
        )
    facts = {name: getattr(engine.info, name) for name in Ready.__struct_fields__}
    return EngineLoop(engine), Ready(**facts | {"cost": engine.info.cost.current})


if __name__ == "__main__":
    sys.exit(serve_engine(load_engine))
