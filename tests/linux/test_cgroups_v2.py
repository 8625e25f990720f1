"""Finding a base in version 2, in the real hierarchy and with a controller that nobody uses.

`hugetlb` stands for memory, cpu and pids: who may hand on what is the same for every controller, and on a hybrid host
it is often the one that version 2 has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.linux.cgroups import v2
from cloche.linux.cgroups.files import Hierarchy, parse_hierarchies
from cloche.linux.mounts import MS_PRIVATE, MS_REC
from cloche.linux.syscalls import mount, unshare

WANTED = frozenset({"hugetlb", "memory"})
NOBODY = 65534
CLONE_NEWNS, CLONE_NEWCGROUP = 0x00020000, 0x02000000


def unified() -> Hierarchy | None:
    found = parse_hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    return next((hierarchy for hierarchy in found if hierarchy.version == 2), None)


def unfit() -> str:
    found = unified()
    if os.geteuid() != 0 or found is None or found.own is None:
        return "needs root and a v2 hierarchy"
    if not v2.is_real_root(found.own) or not os.access(found.own, os.W_OK):
        return "needs to be in the root group of v2, writable"
    return "" if "hugetlb" in v2.read_controllers(found.own) else "v2 has no hugetlb controller here"


pytestmark = pytest.mark.skipif(bool(unfit()), reason=unfit())


@pytest.fixture
def group() -> Iterator[Path]:
    """A group that could hand on hugetlb."""
    found = unified()
    assert found and found.own
    root = Path(found.own)
    was_on = "hugetlb" in (root / "cgroup.subtree_control").read_text().split()
    (root / "cgroup.subtree_control").write_text("+hugetlb")
    made = root / f"cloche-v2-test-{os.getpid()}"
    made.mkdir()
    yield made
    for leaf in (*(path for path in made.iterdir() if path.is_dir()), made):
        leaf.rmdir()
    if not was_on:
        (root / "cgroup.subtree_control").write_text("-hugetlb")


def enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def delegate(group: Path, uid: int) -> None:
    for file in ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
        os.chown(group / file, uid, uid)


def become_nobody() -> None:
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def found_base() -> v2.UnifiedBase | str:
    hierarchy = unified()
    assert hierarchy
    return v2.find_base(hierarchy, WANTED)


def test_the_real_root_delegates_its_controllers() -> None:
    base = found_base()
    assert isinstance(base, v2.UnifiedBase)
    assert (base.controllers & {"hugetlb"}, base.crowded) == ({"hugetlb"}, False)


def test_root_in_a_foreign_group_uses_the_top(group: Path, in_child) -> None:
    def base() -> v2.UnifiedBase | str:
        enter(group)
        return found_base()

    assert in_child(base).path == str(group.parent)


def test_a_group_that_was_delegated_to_us_is_made_room_in(group: Path, in_child) -> None:
    """With processes in it the kernel refuses to enable controllers; from a leaf it works."""
    delegate(group, NOBODY)

    def hand_on() -> tuple[bool, frozenset[str], frozenset[str]]:
        enter(group)
        become_nobody()
        base = found_base()
        assert isinstance(base, v2.UnifiedBase), base
        path = os.fsencode(base.path)
        refused = v2.enable_controllers(path, base.controllers)
        v2.move_to_leaf(path)
        return base.crowded, refused, v2.enable_controllers(path, base.controllers)

    assert in_child(hand_on) == (True, frozenset(), {"hugetlb"})


def test_an_ordinary_user_takes_the_nearest_empty_group_above(group: Path, in_child) -> None:
    delegate(group, NOBODY)
    leaf = group / "terminal"
    leaf.mkdir()

    def base() -> v2.UnifiedBase | str:
        enter(leaf)
        become_nobody()
        return found_base()

    assert in_child(base) == v2.UnifiedBase(str(group), frozenset({"hugetlb"}), crowded=False)


def test_an_ordinary_user_in_a_group_of_root_gets_advice(group: Path, in_child) -> None:
    def base() -> v2.UnifiedBase | str:
        enter(group)
        become_nobody()
        return found_base()

    assert "Delegate=yes" in in_child(base)


def test_a_group_with_strangers_in_it_is_not_made_room_in(group: Path, in_child) -> None:
    delegate(group, NOBODY)
    reading, writing = os.pipe()
    stranger = os.fork()
    if stranger == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    (group / "cgroup.procs").write_text(str(stranger))

    def base() -> v2.UnifiedBase | str:
        enter(group)
        become_nobody()
        return found_base()

    try:
        assert "not ours" in in_child(base)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(stranger, 0)


def test_root_of_a_container_makes_room_in_the_containers_own_group(group: Path, tmp_path: Path, in_child) -> None:
    def hand_on() -> tuple[bool, bool, frozenset[str]]:
        enter(group)
        unshare(CLONE_NEWNS | CLONE_NEWCGROUP)
        mount("none", "/", "", MS_REC | MS_PRIVATE)
        mount("cgroup2", str(tmp_path), "cgroup2", 0)
        text = Path("/proc/self/mountinfo").read_text()
        ours = "".join(line for line in text.splitlines(keepends=True) if str(tmp_path) in line)
        hierarchy = parse_hierarchies(ours, Path("/proc/self/cgroup").read_text())[0]
        base = v2.find_base(hierarchy, WANTED)
        assert isinstance(base, v2.UnifiedBase), base
        v2.move_to_leaf(os.fsencode(base.path))
        return base.path == str(tmp_path), base.crowded, v2.enable_controllers(os.fsencode(base.path), base.controllers)

    assert in_child(hand_on) == (True, True, {"hugetlb"})
