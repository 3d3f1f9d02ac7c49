"""Groups of tests that one process of pytest-xdist runs in sequence, and which process runs which groups."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

# Test files that use Ray. They must not overlap, because a machine has capacity for one cluster only.
RAY = {"test_ranks_on_ray", "test_ray_nodes", "test_replicas_ray", "test_server_orphans"}
# Test files that use the same compiled operations. Otherwise one process would wait while another compiles them.
COMPILED = {"test_ops_amx", "test_ops_invariance"}
# Test files that use models of transformers, whose import takes two seconds and more for each family.
REFERENCES = {
    "test_adapters",
    "test_attention_triton",
    "test_batch_invariant",
    "test_builtin_model",
    "test_cli",
    "test_embeddings",
    "test_encoder_ranks",
    "test_encoders",
    "test_experts",
    "test_fallback",
    "test_fallback_preemption",
    "test_gguf",
    "test_gguf_encoders",
    "test_gguf_errors",
    "test_hybrid_preemption",
    "test_installed_family",
    "test_model_families",
    "test_model_formats",
    "test_model_loader",
    "test_model_ops",
    "test_operations",
    "test_parallel_families",
    "test_parallel_shards",
    "test_quantized",
    "test_recurrent",
    "test_server_model",
    "test_triton_ops",
}
# Folders whose tests mostly wait for other programs and for time limits.
WAITING = {"chaos", "demo", "fuzz", "loadtest", "server"}
# Folders of tests that start no process and have no slow fixture or cache, except the files in SHARING. The longest
# tests come first, so that all processes finish at about the same time.
PURE = ("sim", "recipes", "core_fuzz", "model", "policies", "observe", "core", "kv", "decide")
SHARING = {
    "test_abort_everywhere",
    "test_chat_template",
    "test_econoserve",
    "test_event_stream",
    "test_kernels_compile",
    "test_model_tokenizer",
    "test_one_figure",
    "test_progress",
    "test_recipe_properties",
    "test_recorded_plans",
    "test_smollm2",
    "test_timeline",
    "test_wrong_forecasts",
}
# Files that take many times as long as others. They begin first, so that none of them runs alone at the end.
LONG = {
    "test_batches_killed",
    "test_recipe_properties",
    "test_server_processes",
    "test_simulation",
    "test_sweep",
    "test_worker_sharded",
    *COMPILED,
    *REFERENCES,
}


def group(nodeid: str) -> str:
    """Return the group of a test.

    Args:
        nodeid: `tests/FOLDER/FILE.py::NAME`.
    """
    path, _, _ = nodeid.partition("::")
    file = file_of(path)
    if file.stem in RAY:
        return "ray"
    if file.stem in COMPILED:
        return "compiled"
    if file.stem in REFERENCES:
        return "references"
    return nodeid if file.parent.name in PURE and file.stem not in SHARING else path


file_of = cache(PurePosixPath)


def waits(name: str) -> bool:
    """Return whether the tests of a group mostly wait."""
    return name == "ray" or not WAITING.isdisjoint(file_of(name.partition("::")[0]).parts)


def order(nodeid: str) -> tuple[bool, int, bool]:
    """Return the sort key of a test. Groups that wait come first, and tests outside groups last."""
    name = group(nodeid)
    file = file_of(nodeid.partition("::")[0])
    place = 1 + PURE.index(file.parent.name) if name == nodeid else 0
    return not waits(name), place, name != "ray" and file.stem not in LONG


class Groups(LoadScopeScheduling):
    """Assigns whole groups to processes, in the order of collection.

    Half of the processes prefer groups that compute, so that the processor is busy while tests of the others wait.
    """

    def __init__(self, config, log=None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)

    def _assign_work_unit(self, node) -> None:
        if self.nodes.index(node) < len(self.nodes) // 2:
            computing = next((name for name in self.workqueue if not waits(name)), None)
            if computing is not None:
                self.workqueue.move_to_end(computing, last=False)
        with suppress(OSError):  # the process has crashed, which xdist reports next
            super()._assign_work_unit(node)

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
