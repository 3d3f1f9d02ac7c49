"""Groups of tests that one process of pytest-xdist runs in sequence."""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

# Test files that use Ray. They must not overlap, because a machine has capacity for one cluster only.
RAY = {"test_ranks_on_ray", "test_ray_nodes", "test_replicas_ray", "test_server_orphans"}
# Test files that use the same compiled operations. Otherwise one process would wait while another compiles them.
COMPILED = {"test_ops_amx", "test_ops_invariance"}
# Folders of tests that start no process and have no slow fixture, except the files in SHARING.
PURE = {"core", "kv", "scheduling", "core_fuzz", "model", "observe", "policies", "recipes", "sim"}
SHARING = {
    "test_econoserve",
    "test_installed_family",
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
    if file.stem in COMPILED:
        return "compiled"
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

    def schedule(self) -> None:
        """Give all processes work. One that replaces another needs two groups: it begins a test if it has the next."""
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)

    def _reschedule(self, node) -> None:
        """Skip a process that replaces another and has not collected tests yet; xdist would fail."""
        if node in self.registered_collections:
            super()._reschedule(node)

    def mark_test_complete(self, node, item_index: int, duration: float = 0) -> None:
        """Note the end of a test, and forget its group after the last, because xdist counts all that it knows."""
        super().mark_test_complete(node, item_index, duration)
        groups, name = self.assigned_work[node], group(self.registered_collections[node][item_index])
        if all(groups[name].values()):
            del groups[name]

    def remove_node(self, node) -> str | None:
        """Return the test in which a process crashed, or None, and hand the others that it had left to other processes.

        xdist would repeat the test that crashed, and crash each process. It would also hand over groups that have
        finished: a process that gets one has nothing to report, gets no other group, and the run never ends.
        """
        left = [
            (name, test)
            for name, tests in self.assigned_work.pop(node).items()
            for test, done in tests.items()
            if not done
        ]
        if not left:
            return None
        for name, test in left[1:]:
            self.workqueue.setdefault(name, {})[test] = False
        for other in self.assigned_work:
            self._reschedule(other)
        return left[0][1]
