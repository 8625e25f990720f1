"""What bounds a process that runs in a cgroup, such as a server in a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche.linux.host_memory import available_bytes, cgroup_bytes_left, cgroup_directories, read_number

V2 = {"memory.max": "1000", "memory.current": "600", "memory.stat": "anon 5\ninactive_file 100\n"}
V1 = {
    "memory.limit_in_bytes": "1000",
    "memory.usage_in_bytes": "600",
    "memory.stat": "inactive_file 1\ntotal_inactive_file 200\n",
}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (V2, 500),
        (V1, 600),
        (V2 | {"memory.max": "max"}, None),
        (V1 | {"memory.limit_in_bytes": "9223372036854771712"}, None),
        (V2 | {"memory.current": "2000"}, 0),
        ({}, None),
    ],
    ids=["v2", "v1", "v2 without a limit", "v1 without a limit", "over it", "nothing to be seen"],
)
def test_a_cgroups_free_memory_is_its_limit_minus_usage_without_cache(
    tmp_path: Path, files: dict[str, str], left: int | None
):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert cgroup_bytes_left(str(tmp_path)) == left


def test_the_groups_above_bound_a_process_too():
    memberships = "4:cpu,memory:/a/b\n3:pids:/\n0::/c\n"
    assert cgroup_directories("memory", memberships, "/g") == [
        "/g/memory/a/b",
        "/g/memory/a",
        "/g/memory",
        "/g/c",
        "/g",
    ]
    assert cgroup_directories("pids", memberships, "/g") == ["/g/pids", "/g/c", "/g"]


def test_this_host_has_some_memory_left():
    assert available_bytes() is None or available_bytes() > 0
    assert read_number("/proc/sys/kernel", "pid_max")
