"""Capabilities by number, and the two sets that are ever kept."""

from __future__ import annotations

CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, KILL = 0, 1, 2, 3, 4, 5
SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_ADMIN = 6, 7, 8, 10, 12
SYS_CHROOT, SYS_ADMIN, SYS_RESOURCE, SETFCAP = 18, 21, 24, 31


def capability_mask(*numbers: int) -> int:
    return sum(1 << number for number in numbers)


# What root of a sandbox needs to be root of its own users and files; nothing over the machine.
CELL = capability_mask(CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE)

# What the zygote needs to build cells. All of it counts only inside the nursery's own user namespace.
NURSERY = CELL | capability_mask(
    SYS_ADMIN,  # unshare, setns, mount
    SYS_CHROOT,  # to enter a mount namespace
    NET_ADMIN,  # loopback up, ip_unprivileged_port_start in each cell's own network namespace
    SYS_RESOURCE,  # /proc/sys/user/max_* of each cell's user namespace
    SETFCAP,  # to map uid 0 into a cell's user namespace
    SETPCAP,  # to cut the bounding set again
)
