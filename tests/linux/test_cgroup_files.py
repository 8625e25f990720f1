"""Reading where hierarchies are mounted, from texts as other hosts have them."""

from __future__ import annotations

from cloche.linux.cgroups.files import Hierarchy, parse_hierarchies

HYBRID_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
"""
HYBRID_OWN = "9:name=systemd:/\n4:memory:/nested/group\n1:cpu,cpuacct:/\n0::/system.slice/x.service\n"


def by_mount(mountinfo: str, membership: str) -> dict[str, Hierarchy]:
    return {hierarchy.mount: hierarchy for hierarchy in parse_hierarchies(mountinfo, membership)}


def test_a_hybrid_host_has_each_controller_in_its_own_place() -> None:
    found = by_mount(HYBRID_MOUNTS, HYBRID_OWN)
    assert found["/sys/fs/cgroup/memory"].own == "/sys/fs/cgroup/memory/nested/group"
    assert found["/sys/fs/cgroup/cpu,cpuacct"].controllers == {"cpu", "cpuacct"}
    assert found["/sys/fs/cgroup/cpu,cpuacct"].own == "/sys/fs/cgroup/cpu,cpuacct"
    unified = found["/sys/fs/cgroup/unified"]
    assert (unified.version, unified.own) == (2, "/sys/fs/cgroup/unified/system.slice/x.service")


def test_a_container_without_cgroup_namespace_sees_its_own_group_as_the_mount() -> None:
    mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n"
    assert parse_hierarchies(mounts, "4:memory:/docker/abc/child\n")[0].own == "/sys/fs/cgroup/memory/child"


def test_a_group_outside_the_mount_has_no_path() -> None:
    mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
    assert parse_hierarchies(mounts, "0::/docker/other\n")[0].own is None
    assert parse_hierarchies(mounts.replace("/docker/abc", "/"), "0::/../other\n")[0].own is None


def test_of_two_mounts_of_one_hierarchy_the_one_that_shows_us_counts() -> None:
    mounts = "1 0 0:32 /other /a rw - cgroup2 cgroup rw\n2 0 0:32 / /b\\040c rw - cgroup2 cgroup rw\n"
    assert [(h.mount, h.own) for h in parse_hierarchies(mounts, "0::/mine\n")] == [("/b c", "/b c/mine")]


def test_a_host_without_cgroups_has_none() -> None:
    assert parse_hierarchies("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n", "") == []
