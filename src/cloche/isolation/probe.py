"""The checks behind `cloche doctor`: this host's isolation and limits."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from cloche import errors
from cloche.guest.paths import SHARED_FILES_ID
from cloche.isolation import ids, netlink_gate
from cloche.isolation.base import HostCheck
from cloche.isolation.nursery import SOCKET_BYTES
from cloche.linux import cgroups, landlock
from cloche.linux.lock_guard import GuardedIds, LockGuard
from cloche.model import MIB

MINIMUM_KERNEL = (5, 12)  # mount_setattr
GATE_KERNEL = (5, 14)  # SECCOMP_ADDFD_FLAG_SEND
_ARCHITECTURES = ("x86_64", "aarch64")


def refuse_unless_possible() -> None:
    """Raises IsolationUnavailable, with the alternative, where these walls can never stand."""
    if sys.platform != "linux":
        raise errors.IsolationUnavailable(
            "Cloche's sandboxes need Linux: on macOS and Windows run it in a Linux VM or in its container image"
        )
    if platform.machine() not in _ARCHITECTURES:
        raise errors.IsolationUnavailable(f"Cloche runs on {' and '.join(_ARCHITECTURES)}, not on {platform.machine()}")
    if kernel_version() < MINIMUM_KERNEL:
        raise errors.IsolationUnavailable(
            f"Linux {platform.release()} is too old: 5.12 or newer is needed (mount_setattr)"
        )


def kernel_version() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def host_checks() -> list[HostCheck]:
    """The checks of this host: each is enforced, best effort or missing, and has advice where something is
    missing.
    """
    walls = [_check_landlock(), _check_seccomp(), _check_locks()]
    return [_check_kernel(), _check_namespaces(), _check_ids(), *_check_cgroups(), _check_netlink(), *walls]


def _check_kernel() -> HostCheck:
    state = "enforced" if kernel_version() >= MINIMUM_KERNEL else "missing"
    return HostCheck(
        name="kernel",
        state=state,
        detail=f"Linux {platform.release()}",
        advice="" if state == "enforced" else "use 5.12 or newer",
    )


def _check_namespaces() -> HostCheck:
    """An ordinary user's rights come from user namespaces; root needs them for the cells."""
    blocked = _why_no_user_namespaces()
    if blocked:
        return HostCheck(name="namespaces", state="missing", detail=blocked[0], advice=blocked[1])
    return HostCheck(name="namespaces", state="enforced", detail="user, pid, mount, network, IPC, UTS, cgroup")


def _why_no_user_namespaces() -> tuple[str, str] | None:
    if _read_number("/proc/sys/user/max_user_namespaces") == 0:
        return "user.max_user_namespaces is 0", "sysctl user.max_user_namespaces=15000"
    if os.geteuid() != 0 and _read_number("/proc/sys/kernel/unprivileged_userns_clone") == 0:
        return "kernel.unprivileged_userns_clone is 0", "sysctl kernel.unprivileged_userns_clone=1, or run as root"
    if os.geteuid() != 0 and _read_number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"):
        return (
            "AppArmor restricts unprivileged user namespaces (Ubuntu 23.10 and newer)",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or a profile with `userns,`, or run as root",
        )
    return None


def _check_ids() -> HostCheck:
    found = ids.find_mapping()
    if found.mode == "root":
        return HostCheck(name="user ids", state="enforced", detail="each sandbox has ids of its own (server is root)")
    if found.mode == "subordinate":
        return HostCheck(
            name="user ids", state="enforced", detail=f"each sandbox has 2 of {found.count} subordinate ids"
        )
    return HostCheck(
        name="user ids",
        state="best effort",
        detail="best effort: one id, `user` and `root` inside are one identity; nothing is promised between them",
        advice="install uidmap (newuidmap) and give this user a line in /etc/subuid and /etc/subgid, or run as root",
    )


_MEMORY_DETAIL = "memory_bytes and space_bytes as one bound, memory_and_space_bytes"
_WITHOUT_CGROUPS = {
    "memory": "best effort: init adds it up four times a second and ends a process; memory_bytes for each process by "
    "RLIMIT_DATA; sockets and open files are counted; files without a name and System V objects are refused",
    "pids": "best effort: RLIMIT_NPROC",
    "cpu": "best effort: nothing but the host's scheduler",
    "freezer": "best effort: by SIGSTOP",
}


def _check_cgroups() -> list[HostCheck]:
    rows = []
    for each in cgroups.probe_cgroups().report:
        state = "enforced" if each.version else "best effort"
        detail = f"cgroup {each.version}" if each.version else _WITHOUT_CGROUPS[each.name]
        if each.version and each.name == "memory":
            detail += f": {_MEMORY_DETAIL}"
        if each.version == "v1" and each.name == "memory":
            detail += f"; beside it {SOCKET_BYTES // MIB} MiB for buffers of TCP and UDP"
        rows.append(HostCheck(name=f"limit on {each.name}", state=state, detail=detail, advice=each.advice))
    return rows


def _check_netlink() -> HostCheck:
    detail = f"{netlink_gate.count_allowed_sockets()} sockets of a sandbox at a time; no cgroup is charged for them"
    if kernel_version() < GATE_KERNEL:
        return HostCheck(name="limit on netlink", state="enforced", detail="refused", advice="Linux 5.14, to allow it")
    return HostCheck(name="limit on netlink", state="enforced", detail=detail)


def _check_landlock() -> HostCheck:
    abi = landlock.abi_version()
    if abi:
        return HostCheck(name="landlock", state="enforced", detail=f"second wall around files, ABI {abi}")
    return HostCheck(
        name="landlock", state="missing", detail="not in this kernel", advice="optional: a kernel with lsm=landlock"
    )


def _check_seccomp() -> HostCheck:
    there = Path("/proc/sys/kernel/seccomp/actions_avail").exists()
    state = "enforced" if there else "missing"
    return HostCheck(
        name="seccomp",
        state=state,
        detail="allow-list of system calls",
        advice="" if there else "a kernel with CONFIG_SECCOMP_FILTER",
    )


def guarded_ids(mapping: ids.IdMapping) -> GuardedIds | None:
    """The ids whose locks can be guarded: those that the server has as root, which nothing else on the host uses."""
    if mapping.mode != "root" or mapping.count < ids.REGION_COUNT:
        return None
    return GuardedIds(mapping.start, mapping.count, mapping.start + SHARED_FILES_ID)


def _check_locks() -> HostCheck:
    guarded = guarded_ids(ids.find_mapping())
    try:
        if guarded is None:
            raise PermissionError("sandboxes have no ids of their own, which a server has that is root")
        LockGuard(guarded).close()
    except OSError as error:
        return HostCheck(
            name="locks",
            state="missing",
            detail=f"sandboxes can lock files that others see: {error}",
            advice="optional: a server as root, on a kernel with bpf among its LSMs and no lockdown",
        )
    return HostCheck(name="locks", state="enforced", detail="each sandbox locks files of its own only")


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
