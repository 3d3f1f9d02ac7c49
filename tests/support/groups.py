"""Groups of tests that one process of pytest-xdist runs in sequence."""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

# Test files that use Ray. They must not overlap, because a machine has capacity for one cluster only.
RAY = {"test_ranks_on_ray", "test_ray_nodes", "test_replicas_ray", "test_server_orphans"}
# Folders of tests that start no process and have no slow fixture, except the files in SHARING.
PURE = {"core", "kv", "scheduling", "core_fuzz", "model", "observe", "policies", "recipes", "sim"}
SHARING = {
    "test_econoserve",
    "test_installed_family",
    "test_ops_amx",
    "test_ops_invariance",
    "test_recipe_properties",
    "test_recorded_plans",
    "test_timeline",
}


def group(nodeid: str) -> str:
    """Return the group of a test.

    Args:
        nodeid: `tests/FOLDER/FILE.py::NAME`.
    """
    path, _, _ = nodeid.partition("::")
    file = PurePosixPath(path)
    if file.stem in RAY:
        return "ray"
    return nodeid if file.parent.name in PURE and file.stem not in SHARING else path


def order(nodeid: str) -> int:
    """Return the sort key of a test. Long groups begin first, and tests outside groups fill the remaining time."""
    found = group(nodeid)
    return 0 if found == "ray" else 2 if found == nodeid else 1


class Groups(LoadScopeScheduling):
    """Assigns whole groups to processes, in the order of collection."""

    def __init__(self, config, log=None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)

    def remove_node(self, node) -> str | None:
        """Hand the tests that a process has left to the others, and return the test in which it crashed.

        xdist would hand over finished groups as well. A process that gets one has nothing to report, so it never gets
        another group, and the run does not end. It would also repeat the test that crashed.
        """
        groups = {
            name: {test: done for test, done in tests.items() if not done}
            for name, tests in self.assigned_work.pop(node).items()
        }
        left = {name: tests for name, tests in groups.items() if tests}
        if not left:
            return None
        first = next(iter(left))
        crashed = next(iter(left[first]))
        del left[first][crashed]
        self.workqueue.update({name: tests for name, tests in left.items() if tests})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed
