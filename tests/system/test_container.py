from __future__ import annotations

from pathlib import Path

import pytest

from skipjoin.system.container import free_memory, oom_kills, usable_cpus

V1, V2 = "cgroup cgroup rw,memory", "cgroup2 cgroup2 rw,nsdelegate"
NO_LIMIT = str((1 << 63) - 4096)


def system(root: Path, own: str, mounts: list[str], files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    (root / "proc/self/mountinfo").write_text("\n".join(mounts))
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def folder(path: str, limit: str, used: int, cache: int, kills: int = 0, *, version: int) -> dict[str, str]:
    if version == 2:
        names = ("memory.max", "memory.current", "inactive_file", "memory.events")
    else:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
    return {
        f"{path}/{names[0]}": f"{limit}\n",
        f"{path}/{names[1]}": f"{used}\n",
        f"{path}/memory.stat": f"anon 1\n{names[2]} {cache}\n",
        f"{path}/{names[3]}": f"under_oom 0\noom_kill {kills}\n",
    }


CASES = {
    "v2, in its own namespace": (
        "0::/\n",
        [f"9 8 0:1 / /sys/fs/cgroup rw - {V2}"],
        folder("sys/fs/cgroup", "1000", 700, 200, 3, version=2),
        (500, 3),
    ),
    "v2, with less memory in the parent group": (
        "0::/a/b\n",
        [f"9 8 0:1 / /sys/fs/cgroup rw - {V2}"],
        folder("sys/fs/cgroup/a/b", "max", 700, 0, 1, version=2) | folder("sys/fs/cgroup/a", "1000", 900, 0, version=2),
        (100, 1),
    ),
    "v1, inside a container": (
        "4:memory:/docker/x\n1:cpu:/docker/x\n0::/\n",
        [f"9 8 0:1 /docker/x /sys/fs/cgroup/memory rw - {V1}", f"9 8 0:1 / /sys/fs/cgroup/unified rw - {V2}"],
        folder("sys/fs/cgroup/memory", "1000", 1200, 100, 2, version=1),
        (0, 2),
    ),
    "v1, outside a container, below a group without a limit": (
        "4:memory:/docker/x\n",
        [f"9 8 0:1 / /sys/fs/cgroup/memory rw - {V1}"],
        folder("sys/fs/cgroup/memory/docker/x", "1000", 10, 0, version=1)
        | folder("sys/fs/cgroup/memory", NO_LIMIT, 10**6, 0, version=1),
        (990, 0),
    ),
    "none": ("", [], {"proc/vmstat": "pgfault 7\noom_kill 5\n"}, (None, 5)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_memory_limits_of_both_cgroup_versions(
    tmp_path: Path, case: tuple[str, list[str], dict[str, str], tuple[int, int]]
) -> None:
    own, mounts, files, found = case
    root = system(tmp_path, own, mounts, files)
    assert (free_memory(root), oom_kills(root)) == found


def test_malformed_memory_limit_is_ignored(tmp_path: Path) -> None:
    files = folder("sys/fs/cgroup", "many", 1, 1, version=2)
    assert free_memory(system(tmp_path, "0::/\n", [f"9 8 0:1 / /sys/fs/cgroup rw - {V2}"], files)) is None


def quota_files(path: str, limit: str, *, version: int) -> dict[str, str]:
    if version == 2:
        return {f"{path}/cpu.max": f"{limit} 100000\n"}
    return {f"{path}/cpu.cfs_quota_us": f"{limit}\n", f"{path}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    "case",
    [
        ("0::/", f"/ /sys/fs/cgroup rw - {V2}", quota_files("sys/fs/cgroup", "250000", version=2), 3),
        ("0::/", f"/ /sys/fs/cgroup rw - {V2}", quota_files("sys/fs/cgroup", "max", version=2), 8),
        ("0::/", f"/ /sys/fs/cgroup rw - {V2}", quota_files("sys/fs/cgroup", "1000", version=2), 1),
        (
            "0::/a/b",
            f"/ /sys/fs/cgroup rw - {V2}",
            quota_files("sys/fs/cgroup/a/b", "600000", version=2) | quota_files("sys/fs/cgroup/a", "400000", version=2),
            4,
        ),
        ("3:cpu,cpuacct:/x", "/x /cpu rw - cgroup cgroup rw,cpu,cpuacct", quota_files("cpu", "150000", version=1), 2),
        ("3:cpu,cpuacct:/x", "/x /cpu rw - cgroup cgroup rw,cpu,cpuacct", quota_files("cpu", "-1", version=1), 8),
        ("0::/", f"/ /sys/fs/cgroup rw - {V2}", {"sys/fs/cgroup/cpu.max": "some\n"}, 8),
        ("", "", {}, 8),
    ],
)
def test_cpu_quota_limits_usable_cpus(case, tmp_path: Path, monkeypatch) -> None:
    own, mount, files, cpus = case
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    mounts = [f"9 8 0:1 {mount}"] if mount else []
    assert usable_cpus(system(tmp_path, own, mounts, files)) == cpus
