"""Namespaces: flags, id maps, and the setup of a new network namespace."""

from __future__ import annotations

import fcntl
import socket
import struct

from cloche.linux import syscalls

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000

_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40

Extents = "list[tuple[int, int, int]]"  # (inside, outside, count)


def write_maps(pid: int | str, uids: list, gids: list, *, deny_setgroups: bool = False) -> None:
    """Writes the id maps of `pid`'s user namespace; each extent is (inside, outside, count)."""
    if deny_setgroups:
        _write_file(f"/proc/{pid}/setgroups", "deny")
    _write_file(f"/proc/{pid}/uid_map", _format_extents(uids))
    _write_file(f"/proc/{pid}/gid_map", _format_extents(gids))


def _format_extents(extents: list) -> str:
    return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in extents)


def _write_file(path: str, text: str) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())


def make_network() -> None:
    """Puts the caller into a new network namespace that has loopback, and in which every user may bind every port."""
    syscalls.unshare(NEWNET)
    raise_loopback()
    _write_file("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")


def limit_tcp_buffers() -> None:
    """Limits what one connection in the caller's network namespace may hold to what other sockets do."""
    for name in ("tcp_rmem", "tcp_wmem"):
        _write_file(f"/proc/sys/net/ipv4/{name}", "4096 16384 212992")


def raise_loopback() -> None:
    """Brings `lo` up in the caller's network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP | _IFF_RUNNING))
