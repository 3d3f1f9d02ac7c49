#!/usr/bin/env bash
# Finding: Ray never restarts an actor that calls sys.exit(0), even with max_restarts=-1, but restarts one that calls os._exit(0).
# Version: ray 2.60.0
# Guess: max_restarts=-1 restarts an actor whenever its process is gone, or code 0 means an intended end either way.
# What happens: after sys.exit(0) all calls raise ActorDiedError. After sys.exit(1), os._exit(0) or os._exit(1) a new
#   process answers.
# Why it matters: a supervised process that shuts down in order, say on a signal, stays away for good. Skipjoin's ranks
#   and replicas have no max_restarts; their supervisors create new actors, whatever the exit code.
source "$(dirname "$0")/support.bash"
packages ray==2.60.0
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32)
"$PYTHON" - "$work/found" >/dev/null 2>&1 <<'PY' # Ray logs on both
import os
import sys
import time

import ray

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)


@ray.remote(max_restarts=-1, num_cpus=0)
class Actor:
    def pid(self):
        return os.getpid()

    def leave(self, way, code):
        getattr(sys if way == "sys.exit" else os, way.split(".")[1])(code)


def after(way, code):
    actor = Actor.remote()
    first = ray.get(actor.pid.remote())
    try:
        ray.get(actor.leave.remote(way, code))
    except ray.exceptions.RayActorError:
        pass
    for _ in range(120):
        try:
            return "a new process" if ray.get(actor.pid.remote()) != first else "the same process"
        except ray.exceptions.ActorUnavailableError:
            time.sleep(0.5)
        except ray.exceptions.ActorDiedError as error:
            return type(error).__name__
    return "unavailable for a minute"


with open(sys.argv[1], "w") as found:
    for way, code in (("sys.exit", 0), ("sys.exit", 1), ("os._exit", 0), ("os._exit", 1)):
        print(f"{way}({code}): {after(way, code)}", file=found)
PY
expect "sys.exit(0): ActorDiedError
sys.exit(1): a new process
os._exit(0): a new process
os._exit(1): a new process" <"$work/found"
