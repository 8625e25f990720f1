"""Builds a nursery around a zygote. Runs as its own process: `python -I -m cloche.isolation.launch FD`.

Three processes, each the parent of the next, each of which dies with its parent:

  outer   stays in the host's mount namespace, writes id maps, and serves the netlink gate
  middle  pid 1 of a pid namespace that holds nothing else. It builds the root. Its /proc is all that code in
          the nursery could ever uncover, should it unmount its own
  reaper  pid 1 of the nursery's pid namespace. It adopts sandboxes when their zygote dies: these live on

and then the zygote, which is exec'ed with its rights already cut: importing a template's packages runs their
code.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from cloche.isolation import netlink_gate
from cloche.linux import capabilities, mounts, namespaces, seccomp, syscalls

ZYGOTE_FD = 3
WARM_DIRECTORY = "/opt/cloche/warm"  # see guest/zygote/uv_warmup.py
_BOOT = "import sys; sys.path.insert(0, '/opt/cloche/lib'); from cloche.guest.zygote.main import main; main(3)"


def main() -> NoReturn:
    """argv: the nursery channel's descriptor. stdin: the order as JSON, sent once we are in our cgroup."""
    channel = int(sys.argv[1])
    order = json.load(sys.stdin)
    if order["ids"]["mode"] == "root":
        syscalls.unshare(namespaces.NEWPID)
    else:
        _enter_user_namespace(order["ids"])
    ours, theirs = socket.socketpair()
    middle = os.fork()
    if middle == 0:
        ours.close()
        _run_stage(lambda: _run_middle(order, channel, theirs))
    os.close(channel)
    theirs.close()
    _die_with_parent(order["host_pid"])
    _map_when_asked(ours, middle, order["ids"])
    _serve_netlink(ours, os.pidfd_open(middle))
    os._exit(_exit_code(middle))


def _run_stage(work: Any) -> NoReturn:
    """A forked stage must never run on into its parent's code."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - a fork must never run on into its parent's code
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _die_with_parent(parent: int) -> None:
    """SIGKILL for us when our parent ends. Set after the last change of credentials, which would clear it."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _exit_code(child: int) -> int:
    """Waits for `child` (and reaps all other children) until it ends."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(status) & 0xFF


# --- outer ---------------------------------------------------------------------------------------------------------


def _enter_user_namespace(ids: dict[str, Any]) -> None:
    """An ordinary user's rights over mounts come from a user namespace of its own."""
    uid, gid = os.geteuid(), os.getegid()
    if ids["mode"] == "single":
        syscalls.unshare(namespaces.NEWUSER | namespaces.NEWPID)
        namespaces.write_maps("self", [(0, uid, 1)], [(0, gid, 1)], deny_setgroups=True)
        return
    ready_read, ready_write = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        os.close(ready_write)
        _run_stage(lambda: _map_with_setuid_tools(ready_read, os.getppid(), ids, uid, gid))
    syscalls.unshare(namespaces.NEWUSER | namespaces.NEWPID)
    os.close(ready_write)
    _, status = os.waitpid(mapper, 0)
    if status:
        raise RuntimeError("newuidmap or newgidmap refused the subordinate ids of this user")


def _map_with_setuid_tools(ready: int, pid: int, ids: dict[str, Any], uid: int, gid: int) -> NoReturn:
    os.read(ready, 1)
    for tool, own, (start, count) in (("newuidmap", uid, ids["subuids"]), ("newgidmap", gid, ids["subgids"])):
        subprocess.run([tool, str(pid), "0", str(own), "1", "1", str(start), str(count)], check=True)
    os._exit(0)


def _map_when_asked(sync: socket.socket, middle: int, ids: dict[str, Any]) -> None:
    if sync.recv(1):
        namespaces.write_maps(middle, ids["nursery_uids"], ids["nursery_gids"])
        sync.send(b"m")


def _serve_netlink(sync: socket.socket, middle: int) -> None:
    """Serves the netlink gate for the nursery, with no right but the one it takes, until middle ends.

    Also returns if there is no listener: then the filter refuses netlink.
    """
    syscalls.set_capabilities(1 << capabilities.SYS_ADMIN)
    poll = select.poll()
    poll.register(sync, select.POLLIN)
    poll.register(middle, select.POLLIN)
    if middle in dict(poll.poll()):
        return
    fds = socket.recv_fds(sync, 1, 1)[1]
    if fds:
        netlink_gate.NetlinkGate(fds[0]).serve(middle)


# --- middle --------------------------------------------------------------------------------------------------------


def _run_middle(order: dict[str, Any], channel: int, sync: socket.socket) -> None:
    syscalls.unshare(namespaces.NEWNS)
    mounts.make_private()
    _build_root(order["root"], order["plan"])
    mounts.enter_root(order["root"])
    syscalls.unshare(namespaces.NEWUSER)
    sync.send(b"u")
    if not sync.recv(1):
        return
    _become_root_of_nursery(order["ids"]["mode"])
    syscalls.unshare(
        namespaces.NEWNS
        | namespaces.NEWPID
        | namespaces.NEWNET
        | namespaces.NEWIPC
        | namespaces.NEWUTS
        | namespaces.NEWCGROUP
    )
    reaper = os.fork()
    if reaper == 0:
        _run_stage(lambda: _run_reaper(order, channel, sync))
    os.close(channel)
    _die_with_parent(0)  # our parent lies outside our pid namespace, so its pid reads 0
    _check_outer_lives(sync)
    os._exit(_exit_code(reaper))


def _check_outer_lives(sync: socket.socket) -> None:
    """Ends us if outer died before our death signal was set. (The reaper needs no such check: it dies with us.)"""
    try:
        if not sync.recv(1, socket.MSG_DONTWAIT):
            os._exit(1)
    except BlockingIOError:
        pass


def _become_root_of_nursery(mode: str) -> None:
    if mode != "single":
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _build_root(root: str, plan: dict[str, Any]) -> None:
    syscalls.mount("cloche", root, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "size=4m,nr_inodes=4096,mode=755")
    os.umask(0o022)
    write_root_files(root, plan)
    for source, name in plan["binds"]:
        _bind_path(source, f"{root}/{name}", mounts.SEALED_ATTRIBUTES)
    for device in plan["devices"]:
        _bind_path(device, root + device, mounts.ATTR_NOSUID | mounts.ATTR_NOEXEC)
    link_root_paths(root, plan)
    for name, source in plan["covers"].items():
        mounts.bind_mount(f"{root}/{source}", f"{root}/{name}")
    syscalls.mount("proc", f"{root}/proc", "proc", mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC)
    mounts.seal_mount(root)


def write_root_files(root: str, plan: dict[str, Any]) -> None:
    """The directories, files and programs of the plan that lie in the root itself."""
    for name in [*plan["directories"], "opt/cloche/empty"]:
        os.makedirs(f"{root}/{name}", exist_ok=True)
    for name, text in plan["files"].items():
        _write_file(f"{root}/{name}", text)
    for name, text in plan["programs"].items():
        _write_file(f"{root}/{name}", text)
        os.chmod(f"{root}/{name}", 0o755)


def link_root_paths(root: str, plan: dict[str, Any]) -> None:
    for name, target in plan["links"].items():
        os.makedirs(os.path.dirname(f"{root}/{name}"), exist_ok=True)
        os.symlink(target, f"{root}/{name}")


def make_mount_point(source: str, target: str) -> None:
    """A directory or file for a bind of that source, unless there is one."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        _write_file(target, "")


def _write_file(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def _bind_path(source: str, target: str, attributes: int) -> None:
    """A bind of a directory or file, with a mount point of the same kind."""
    make_mount_point(source, target)
    mounts.bind_mount(source, target, attributes)


# --- reaper and zygote ---------------------------------------------------------------------------------------------


def _run_reaper(order: dict[str, Any], channel: int, sync: socket.socket) -> None:
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.mount("proc", "/proc", "proc", mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC)
    syscalls.mount("nursery", "/tmp", "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "size=64m,nr_inodes=4096,mode=1777")
    if os.path.isdir(WARM_DIRECTORY):
        syscalls.mount(
            "warm", WARM_DIRECTORY, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "size=1m,nr_inodes=256,mode=755"
        )
    syscalls.set_hostname("nursery")
    # A zygote with the pid that kernels have in their own namespace would look to libraries as if no fork had happened.
    Path("/proc/sys/kernel/ns_last_pid").write_text("30000")
    if os.fork() == 0:
        _run_stage(lambda: _exec_zygote(order, channel, sync))
    os.close(channel)
    sync.close()
    os.close(2)
    _die_with_parent(0)
    _reap_forever()


def _reap_forever() -> NoReturn:
    """Ends when no child is left: neither the zygote nor a sandbox that outlived it."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            os._exit(0)


def _exec_zygote(order: dict[str, Any], channel: int, sync: socket.socket) -> None:
    """Cuts rights, then execs the template's interpreter. From here on foreign code may run."""
    os.setsid()
    channel, outer = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, ZYGOTE_FD + 2) for fd in (channel, sync.fileno()))
    os.dup2(outer, ZYGOTE_FD + 1, inheritable=False)
    os.dup2(channel, ZYGOTE_FD)
    syscalls.close_from(ZYGOTE_FD + 2)
    syscalls.drop_bounding(capabilities.NURSERY, syscalls.last_capability())
    syscalls.set_capabilities(capabilities.NURSERY)
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # 0 would not stop a core handler that is a pipe
    # Regardless of the host service's settings, and for all later sandboxes: a realtime program stops all others.
    resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
    files = min(order["open_files"], resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    listener = seccomp.SeccompFilter(bytes.fromhex(order["seccomp"])).install_with_listener()
    if listener is None and order["uncharged"]:
        raise RuntimeError("sockets cannot be counted behind another program's seccomp listener, and no cgroup does it")
    with socket.socket(fileno=ZYGOTE_FD + 1) as outer_end:
        socket.send_fds(outer_end, [b"l"], [] if listener is None else [listener])
    os.chdir("/")
    os.execve(order["python"], [order["python"], "-I", "-c", _BOOT], order["env"])


if __name__ == "__main__":
    main()
