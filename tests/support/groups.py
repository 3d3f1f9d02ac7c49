"""Which tests may run beside each other where several processes run them (pytest-xdist)."""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

# Files of tests that use Ray: a machine has room for one cluster.
RAY = {"test_ranks_on_ray", "test_ray_nodes", "test_replicas_ray", "test_server_orphans"}
# Folders of tests that start no process and share nothing that is slow to make, but for some files.
PURE = {"core", "kv", "scheduling", "core_fuzz", "model", "observe", "policies", "recipes", "sim"}
SHARING = {"test_econoserve", "test_installed_family", "test_recipe_properties", "test_recorded_plans", "test_timeline"}


def group(nodeid: str) -> str:
    """One process runs the tests of a group, one after another. nodeid: of a test, `tests/FOLDER/FILE.py::NAME`."""
    path, _, _ = nodeid.partition("::")
    file = PurePosixPath(path)
    if file.stem in RAY:
        return "ray"
    return nodeid if file.parent.name in PURE and file.stem not in SHARING else path


def place(nodeid: str) -> int:
    """What is to begin first has the least: the longest group, then files, then tests that fill what is left."""
    found = group(nodeid)
    return 0 if found == "ray" else 2 if found == nodeid else 1


class Groups(LoadScopeScheduling):
    """Gives processes whole groups, in the order in which the tests were collected."""

    def __init__(self, config, log=None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
