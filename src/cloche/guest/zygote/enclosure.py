"""The walls around one sandbox, in the order that makes them walls.

They go up in the child that will be its init. When `raise_walls` starts, the process is pid 1 of a new pid
namespace and root of the *nursery's* user namespace, which owns the pid and network namespaces made by the
init factory and the mount, IPC, UTS and cgroup namespaces made here. Only after everything is mounted does it
enter a user namespace of its own. So the sandbox's root owns none of its other namespaces: it can neither
mount nor unmount.

Everything that is the same for all sandboxes is prepared once, in the zygote, down to the bytes of each
system call: a page of the zygote that a sandbox touches is copied, which costs 3 microseconds and 4 KB each
time.
"""

from __future__ import annotations

import os
import resource
import socket

from cloche.linux import capabilities, landlock, mounts, namespaces, seccomp, syscalls

STAGE = "/opt/cloche/cell"
DATA = "/mnt/data"
_QUIET = mounts.MS_NOSUID | mounts.MS_NODEV
_SEALED = _QUIET | mounts.MS_NOEXEC | mounts.MS_RDONLY | mounts.MS_BIND | mounts.MS_REMOUNT
_OWN_NAMESPACES = namespaces.NEWNS | namespaces.NEWIPC | namespaces.NEWUTS | namespaces.NEWCGROUP
# What `enter` goes through. The user namespace comes last: it is the one that takes the rights to enter the others.
_DOORS = (
    ("/proc/self/ns/mnt", namespaces.NEWNS),
    ("/proc/self/ns/net", namespaces.NEWNET),
    ("/proc/self/ns/ipc", namespaces.NEWIPC),
    ("/proc/self/ns/uts", namespaces.NEWUTS),
    ("/proc/self/ns/cgroup", namespaces.NEWCGROUP),
    ("/proc/self/ns/user", namespaces.NEWUSER),
)
_NO_DOORS = (("/dev/null", 0),)  # whoever is let in is inside already; that it was sent something lets it in
# directory of the sandbox's own tmpfs, where it is seen, mode, owner inside
_PLACES = (
    ("home", "/home/user", 0o755, 1000),
    ("data", "/mnt/data", 0o755, 1000),
    ("app", "/app", 0o755, 1000),  # where templates built from Dockerfiles customarily work
    ("workspace", "/workspace", 0o755, 1000),  # the root of the OpenAI Agents SDK, and of others
    ("tmp", "/tmp", 0o1777, 0),
    ("vartmp", "/var/tmp", 0o1777, 0),
    ("shm", "/dev/shm", 0o1777, 0),
    ("root", "/root", 0o700, 0),
    ("run", "/run", 0o755, 0),
)
WRITABLE = (*(target for _, target, _, _ in _PLACES), "/dev", "/proc")
# Files of /proc that tell about the host or act on it. The rest of that kind is the host's root's alone to read.
_MASKED_FILES = (
    "kcore",
    "keys",
    "key-users",
    "latency_stats",
    "timer_list",
    "sched_debug",
    "sysrq-trigger",
    "interrupts",
    "softirqs",
    "diskstats",
    "partitions",
    "crypto",
    "consoles",
    "config.gz",
    "cmdline",  # of the kernel: some have keys in it, and all of them tell one host from another
)
_MASKED_DIRECTORIES = ("acpi", "scsi", "bus", "fs", "irq")
_READ_ONLY = ("sys",)
_BOOT_ID = "sys/kernel/random/boot_id"
_CEILINGS = {
    "max_inotify_instances": 8,  # else one sandbox could use up those of the host's user
    "max_inotify_watches": 8192,
    "max_fanotify_groups": 0,
    "max_cgroup_namespaces": 0,
    "max_ipc_namespaces": 0,
    "max_mnt_namespaces": 0,
    "max_net_namespaces": 0,
    "max_pid_namespaces": 0,
    "max_time_namespaces": 0,
    "max_uts_namespaces": 0,
}
_LIMITS = (  # that of core dumps is the nursery's, and cannot be changed behind its filter
    (resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10)),
    (resource.RLIMIT_MSGQUEUE, (819200, 819200)),
    (resource.RLIMIT_SIGPENDING, (4096, 4096)),
)


class Enclosure:
    """The walls, prepared. `raise_walls` puts them up around the calling process."""

    def __init__(self, single: bool, filter_program: bytes):
        self._single = single
        self._uid = 1000 if single else 0  # with one mapped uid, init is that one
        self._own_namespaces, self._user_namespace = _OWN_NAMESPACES, namespaces.NEWUSER
        self._space: dict = {}
        self._places = [(f"{STAGE}/{name}", owner) for name, _, _, owner in _PLACES]
        self._binds = syscalls.PreparedCalls()
        for name, target, _, _ in _PLACES:
            self._binds.mount(f"{STAGE}/{name}", target, "", mounts.MS_BIND)
        self._mounts = syscalls.PreparedCalls()
        self._mounts.mount("devpts", "/dev/pts", "devpts", _NO_EXEC, "newinstance,ptmxmode=0666,mode=0620,max=64")
        self._mounts.mount("proc", "/proc", "proc", _QUIET | mounts.MS_NOEXEC)
        self._boot_id = f"{STAGE}/boot_id"
        self._masks = _prepare_masks(self._boot_id)
        ceilings = {**_CEILINGS, "max_user_namespaces": 64 if single else 0}
        self._ceilings = [
            (name, b"%d" % value) for name, value in ceilings.items() if _exists_in_proc(f"sys/user/{name}")
        ]
        unwanted = [number for number in range(syscalls.last_capability() + 1) if not capabilities.CELL >> number & 1]
        self._doors: tuple = _DOORS
        self._rights = syscalls.PreparedCalls()
        self._rights.drop_bounding(unwanted)
        self._rights.set_capabilities(capabilities.CELL)
        self._rights.prctl(syscalls.PR_SET_DUMPABLE, 0)
        self._rights.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        self._landlock = landlock.LandlockWall(WRITABLE) if landlock.abi_version() else None
        self._filter = seccomp.SeccompFilter(filter_program)
        self._limits: tuple = _LIMITS

    @classmethod
    def for_rehearsal(cls) -> Enclosure:
        """For rehearsals: to raise it runs the same code, makes no namespace, no mount, and takes no right away."""
        walls = cls(True, b"")
        walls._uid = os.getuid()
        walls._own_namespaces = walls._user_namespace = 0
        walls._boot_id = "/dev/null"
        walls._places, walls._ceilings, walls._limits, walls._landlock = [], [], (), None
        walls._binds = walls._mounts = walls._masks = walls._rights = syscalls.PreparedCalls()
        walls._rights.prctl(syscalls.PR_GET_DUMPABLE)
        walls._space = {(0, 0): walls._rights}
        return walls

    @classmethod
    def with_own_kernel(cls, filter_program: bytes) -> Enclosure:
        """For a sandbox that has a kernel of its own, which no other sandbox is in: see `standalone`.

        The namespaces, /proc and /dev of that kernel are the sandbox's already, and that kernel is the outer wall. Here
        the sandbox gets its space, and its programs lose the rights that init has needed for it.
        """
        walls = cls(False, filter_program)
        walls._own_namespaces = walls._user_namespace = 0
        walls._mounts = syscalls.PreparedCalls()
        walls._masks = _prepare_masks(walls._boot_id, "/opt/cloche/nothing")
        walls._doors, walls._ceilings, walls._landlock = _NO_DOORS, [], None
        walls._limits = ()  # those of other sandboxes' kernels are out of reach
        return walls

    def raise_walls(self, spec: dict, ask_for_maps) -> list:
        """Puts the walls up around this process; returns the descriptors for `enter`: namespaces, Landlock's rules.

        `ask_for_maps()` returns once the init factory has written this process's id maps.
        """
        syscalls.unshare(self._own_namespaces)  # the network namespace we have from the cradle, which has left it to us
        self._mount_space(spec)
        volumes = spec.get("volumes", ())
        if volumes:
            _mount_volumes(volumes)
        self._write_boot_id()
        self._mounts.make()
        syscalls.set_hostname("cloche")
        if spec.get("uncharged"):
            namespaces.limit_tcp_buffers()
        sysctl = os.open("/proc/sys/user", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if self._ceilings else -1
        self._masks.make()
        landlock_wall = _wall_with(volumes) if volumes and self._landlock else self._landlock
        rules = [landlock_wall.build().fd] if landlock_wall else []  # nothing is mounted after this

        syscalls.unshare(self._user_namespace)
        doors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path, _ in self._doors]
        ask_for_maps()
        self._become_init()
        if sysctl >= 0:
            self._set_ceilings(sysctl)
        self._cut_rights(spec["open_files"], rules)
        return doors + rules

    def enter(self, spec: dict, doors: list) -> None:
        """Takes a process that was forked before the walls stood behind them, to be like init itself from then on."""
        doors, rules = doors[: len(self._doors)], doors[len(self._doors) :]
        if len(rules) != bool(self._landlock):
            raise RuntimeError("init has sent other doors than there are")
        for fd, (_, kind) in zip(doors, self._doors, strict=True):
            if kind:
                syscalls.setns(fd, kind)
        self._become_init()
        self._cut_rights(spec["open_files"], rules)

    def _cut_rights(self, open_files: int, rules: list) -> None:
        self._set_limits(open_files)
        self._rights.make()  # the bounding set too: unshare(user) had filled it again
        for fd in rules:
            landlock.restrict_thread(fd)
        if not self._single:  # with one uid init still has to make user namespaces, and each child gets the filter
            self._filter.install()

    def prepare_for(self, spec: dict) -> None:
        """Before `raise_walls`: encodes a spec's own mount, if that is new."""
        self._space.setdefault((spec["space_bytes"], spec["inodes"]), _prepare_space(spec))

    def _mount_space(self, spec: dict) -> None:
        """All that the sandbox can write to is one tmpfs with a size, so that a full disk is full inside only."""
        self._space[spec["space_bytes"], spec["inodes"]].make()
        owners = {inside: self._outside_id(spec, inside) for inside in (0, 1000)}
        for path, owner in self._places:
            os.chown(path, owners[owner], owners[owner])
        self._binds.make()

    def _write_boot_id(self) -> None:
        """Each sandbox has one of its own, as if it had booted: the host's would tell which of them share a host."""
        digits = os.urandom(16).hex()
        text = f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}\n"
        fd = os.open(self._boot_id, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444)
        os.write(fd, text.encode())
        os.close(fd)

    def _outside_id(self, spec: dict, inside: int) -> int:
        """The nursery's id for an id inside the sandbox."""
        if self._single:
            return 0
        return int(spec["base_id"]) + (1 if spec["sparse"] and inside else inside)

    def _become_init(self) -> None:
        """Root of the sandbox; or, where a single uid is mapped, that uid, which reads 1000 inside."""
        if not self._single:
            os.setgroups([])
        os.setresgid(self._uid, self._uid, self._uid)
        os.setresuid(self._uid, self._uid, self._uid)

    def _set_ceilings(self, sysctl: int) -> None:
        for name, value in self._ceilings:
            fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=sysctl)
            os.write(fd, value)
            os.close(fd)
        os.close(sysctl)

    def _set_limits(self, open_files: int) -> None:
        """Init itself may have more open files than its programs (see `Defaults.open_files`).

        It passes descriptors to the host. Those on their way count for the user of the host, against the sender's
        limit: where sandboxes share that user, a program of one could else keep the init of another from sending.
        """
        room = min(open_files + _ROOM, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, room))
        for kind, limits in self._limits:
            resource.setrlimit(kind, limits)


_ROOM = 4096
_NO_EXEC = mounts.MS_NOSUID | mounts.MS_NOEXEC


def _prepare_space(spec: dict) -> syscalls.PreparedCalls:
    """A sandbox's tmpfs and the directories in it.

    It stays mounted where it is staged, closed to everyone inside: to unmount it would wait for all CPUs.
    """
    space = syscalls.PreparedCalls()
    options = f"size={spec['space_bytes']},nr_inodes={spec['inodes']},mode=700"
    space.mount("space", STAGE, "tmpfs", _QUIET, options)
    for name, _, mode, _ in _PLACES:
        space.make_directory(f"{STAGE}/{name}", mode)
    return space


def _mount_volumes(volumes: list) -> None:
    """Mounts each volume at `/mnt/NAME`; a read-only directory of the sandbox's own space has the mount points.

    The sandbox that holds an unused volume, and saves it, has it in the place of its /mnt/data.
    """
    stage = f"{STAGE}/mnt"
    os.mkdir(stage, 0o755)
    for path in {DATA, *(path for path, _ in volumes)}:
        os.mkdir(f"{STAGE}{path}", 0o755)
    syscalls.mount(stage, "/mnt", "", mounts.MS_BIND)
    syscalls.mount("none", "/mnt", "", _QUIET | mounts.MS_RDONLY | mounts.MS_BIND | mounts.MS_REMOUNT)
    syscalls.mount(f"{STAGE}/data", DATA, "", mounts.MS_BIND)
    for path, tree in volumes:
        mounts.attach_tree(tree, path)


def _wall_with(volumes: list) -> landlock.LandlockWall:
    return landlock.LandlockWall((*WRITABLE, *(path for path, _ in volumes)))


def _prepare_masks(boot_id: str, nothing: str = "/dev/null") -> syscalls.PreparedCalls:
    """Binds over parts of the sandbox's own /proc: read-only, empty, `nothing`, or a file of the sandbox's."""
    masks = syscalls.PreparedCalls()
    for path in (f"/proc/{name}" for name in _READ_ONLY if _exists_in_proc(name)):
        masks.mount(path, path, "", mounts.MS_BIND)
        masks.mount("none", path, "", _SEALED)
    if _exists_in_proc(_BOOT_ID):
        masks.mount(boot_id, f"/proc/{_BOOT_ID}", "", mounts.MS_BIND)
    for name in filter(_exists_in_proc, _MASKED_FILES):
        masks.mount(nothing, f"/proc/{name}", "", mounts.MS_BIND)
    for name in filter(_exists_in_proc, _MASKED_DIRECTORIES):
        masks.mount("/opt/cloche/empty", f"/proc/{name}", "", mounts.MS_BIND)
    return masks


def tidy_own_kernel() -> None:
    """With a kernel of its own: makes the root as those of other sandboxes, and removes what none of them has."""
    kept = mounts.MS_BIND | mounts.MS_REMOUNT | mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV
    syscalls.mount("none", "/", "", kept)
    syscalls.umount("/sys", mounts.MNT_DETACH)
    os.unlink("/dev/fuse")
    for directory in ("/dev/net", "/dev/char"):
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)
    syscalls.mount("none", "/dev", "", mounts.MS_BIND | mounts.MS_REMOUNT | mounts.MS_RDONLY | _NO_EXEC)


def wait_for_admission(door: socket.socket) -> list:
    """Receives the descriptors that init sends to admit this process.

    Exits if init could not raise the walls, or died.
    """
    try:
        door.send(b"%d" % os.getpid())
        doors = socket.recv_fds(door, 1, 16)[1]
    except ConnectionError:
        os._exit(1)
    return doors or os._exit(1)


def _exists_in_proc(name: str) -> bool:
    return os.path.exists(f"/proc/{name}")
