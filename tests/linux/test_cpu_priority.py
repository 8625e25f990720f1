"""The server's own CPU group, in the real hierarchy where that may be written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloche.linux import cgroups, cpu_priority
from cloche.linux.cgroups.files import HOST_LEAF, Hierarchy, mounted_hierarchies

HERE = cpu_priority.find_server_group(mounted_hierarchies())
needs_a_leaf = pytest.mark.skipif(HERE is None, reason="needs a CPU group that this process may make others in")


def cpu_groups() -> list[str]:
    """Of this process, in all hierarchies that may weigh CPU."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    return [path for _, controllers, path in lines if "cpu" in controllers.split(",") or not controllers]


def in_the_leaf() -> bool:
    return any(os.path.basename(path) == HOST_LEAF for path in cpu_groups())


@needs_a_leaf
def test_it_is_taken_for_as_long_as_is_asked(in_child: Callable[[Callable[[], Any]], Any]):
    def life() -> list[bool]:
        seen = [in_the_leaf()]
        with cpu_priority.raised_priority() as taken:
            seen += [taken, in_the_leaf()]
        return [*seen, in_the_leaf()]

    before, *within, after = in_child(life)
    assert within == [True, True]
    assert after == before


@needs_a_leaf
def test_members_have_the_weight_of_four(in_child: Callable[[Callable[[], Any]], Any]):
    def weight() -> str:
        leaf = cpu_priority.find_server_group(mounted_hierarchies())
        assert leaf
        with cpu_priority.raised_priority():
            return Path(os.fsdecode(leaf.directory + leaf.file)).read_text().strip()

    assert in_child(weight) in ("4096", "400")


@needs_a_leaf
def test_the_groups_of_sandboxes_are_made_beside_it(in_child: Callable[[Callable[[], Any]], Any]):
    def bases() -> tuple[list[str], list[str]]:
        before = [each.path for each in cgroups.probe_cgroups().report]
        with cpu_priority.raised_priority():
            return before, [each.path for each in cgroups.probe_cgroups().report]

    before, within = in_child(bases)
    assert within == before


@needs_a_leaf
def test_another_server_keeps_it_when_one_leaves(in_child: Callable[[Callable[[], Any]], Any]):
    def other_leaves() -> bool:
        with cpu_priority.raised_priority():
            pid = os.fork()
            if pid == 0:
                with cpu_priority.raised_priority():
                    pass
                os._exit(0)
            os.waitpid(pid, 0)
            return in_the_leaf()

    assert in_child(other_leaves)


def unified(own: Path, *, root: bool, enabled: str) -> Hierarchy:
    """A group of version 2 as the kernel shows it, in ordinary files."""
    own.mkdir(exist_ok=True)
    (own / "cgroup.subtree_control").write_text(enabled)
    if not root:
        (own / "cgroup.type").write_text("domain\n")
    return Hierarchy(2, frozenset(), str(own), str(own))


@pytest.mark.parametrize(
    ("root", "enabled", "found"),
    [(True, "cpu memory", True), (True, "memory", False), (False, "cpu memory", False)],
    ids=["the real root", "no weights to be had", "a scope of somebody's"],
)
def test_where_version_2_has_one(tmp_path: Path, root: bool, enabled: str, found: bool):
    leaf = cpu_priority.find_server_group([unified(tmp_path / "own", root=root, enabled=enabled)])
    expected = cpu_priority.ServerGroup(os.fsencode(tmp_path / "own" / HOST_LEAF), b"/cpu.weight", 400)
    assert leaf == (expected if found else None)


def test_the_leaf_that_a_container_has_made_room_in_is_taken(tmp_path: Path):
    above = unified(tmp_path / "container", root=False, enabled="cpu")
    own = unified(tmp_path / "container" / HOST_LEAF, root=False, enabled="")
    assert above.own and own.own
    assert cpu_priority.find_server_group([own]) == cpu_priority.ServerGroup(os.fsencode(own.own), b"/cpu.weight", 400)


def test_where_the_group_is_gone_there_is_none(tmp_path: Path):
    assert cpu_priority.find_server_group([]) is None
    assert cpu_priority.find_server_group([Hierarchy(2, frozenset(), str(tmp_path), str(tmp_path / "gone"))]) is None
    assert cpu_priority.find_server_group([Hierarchy(1, frozenset({"cpu"}), str(tmp_path), None)]) is None


def test_an_unenterable_group_is_left_unchanged(tmp_path: Path):
    """A directory that is no group: there is nothing in it that a weight could be written to."""
    leaf = cpu_priority.ServerGroup(os.fsencode(tmp_path / HOST_LEAF), b"/cpu.shares", 4096)
    assert not leaf.enter()
    assert not (tmp_path / HOST_LEAF).exists()
