"""System calls that Python lacks, each a function that raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_machine = platform.machine()

# Looked up here and once: a first look in a sandbox would write to pages that it shares with the zygote.
_capset = _libc.capset
_chmod = _libc.chmod
_fstatfs = _libc.fstatfs
_mkdir = _libc.mkdir
_mount = _libc.mount
_prctl = _libc.prctl
_setfsgid = _libc.setfsgid
_setfsuid = _libc.setfsuid
_sethostname = _libc.sethostname
_setns = _libc.setns
_syscall = _libc.syscall
_umount2 = _libc.umount2
_unshare = _libc.unshare

# Numbers from 424 on are the same on every architecture.
OPEN_TREE, MOVE_MOUNT, FSOPEN, FSCONFIG, FSMOUNT, MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(_machine, -1)
CLOSE_RANGE = 436

PR_SET_PDEATHSIG = 1
PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

PROC_SUPER_MAGIC = 0x9FA0
TMPFS_MAGIC = 0x01021994


def check_result(result: int, what: str) -> int:
    """`result`, or OSError from errno if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *args: int | bytes | None, name: str = "") -> int:
    """A raw system call. Integers are passed as 64-bit values."""
    raw = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return check_result(_syscall(ctypes.c_long(number), *raw), name or f"syscall {number}")


_mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def prctl(option: int, arg2: int = 0, arg3: int = 0, arg4: int = 0, arg5: int = 0) -> int:
    return check_result(_prctl(option, arg2, arg3, arg4, arg5), "prctl")


_bare_fork = ctypes.PyDLL(None, use_errno=True).fork


def fork_bare() -> int:
    """fork() without Python's own hooks before and after it, which touch 250 pages: a third of a fork's cost.

    Only for a process with one thread that holds no lock. The work of hooks for the child's sake (reseeding
    `random`) is the child's to do.
    """
    return check_result(_bare_fork(), "fork")


def unshare(flags: int) -> None:
    check_result(_unshare(flags), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    check_result(_setns(fd, kind), f"setns {kind:#x}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    result = _mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
    check_result(result, f"mount {kind or source} on {target}")


def umount(target: str, flags: int = 0) -> None:
    check_result(_umount2(target.encode(), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    syscall(PIVOT_ROOT, new.encode(), old.encode(), name="pivot_root")


def set_hostname(name: str) -> None:
    raw = name.encode()
    check_result(_sethostname(raw, len(raw)), "sethostname")


def close_range(lowest: int, highest: int) -> None:
    syscall(CLOSE_RANGE, lowest, highest, 0, name="close_range")


def close_from(lowest: int) -> None:
    """Closes every descriptor from `lowest` up."""
    close_range(lowest, 0xFFFFFFFF)


def set_fs_identity(uid: int, gid: int) -> None:
    """File-system uid and gid of the calling thread. The kernel reports no failure, so we ask afterwards.

    gVisor has no such call. The effective ids are also those of file work, and root's rights go and come with them.
    """
    _setfsgid(gid)
    _setfsuid(uid)
    acting = _setfsuid(-1)
    if acting == -1:
        _set_effective_ids(uid, gid)
    elif acting != uid:
        raise PermissionError(f"could not act as uid {uid}")


def _set_effective_ids(uid: int, gid: int) -> None:
    """For a process of root's with one thread."""
    if os.geteuid() != 0:
        os.seteuid(0)  # first: another uid may not change the gid
    os.setegid(gid)
    os.seteuid(uid)


_CAPABILITY_VERSION_3 = 0x20080522


def set_capabilities(keep: int) -> None:
    """Makes the bit set `keep` the effective and permitted capabilities, with nothing inheritable or ambient."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    check_result(_capset(*_capability_sets(keep)), "capset")


def _capability_sets(keep: int) -> tuple:
    """The two arguments of capset(2)."""
    low, high = keep & 0xFFFFFFFF, keep >> 32
    return struct.pack("Ii", _CAPABILITY_VERSION_3, 0), struct.pack("6I", low, low, 0, high, high, 0)


class PreparedCalls:
    """System calls with arguments encoded once, made many times, in order, as cheaply as possible."""

    def __init__(self) -> None:
        self._calls: list = []

    def mount(self, source: str, target: str, kind: str, flags: int, data: str = "") -> None:
        args = (source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
        self._calls.append((_mount, args, f"mount {kind or source} on {target}"))

    def make_directory(self, path: str, mode: int) -> None:
        """With exactly that mode, regardless of the umask."""
        self._calls.append((_mkdir, (path.encode(), mode), f"mkdir {path}"))
        self._calls.append((_chmod, (path.encode(), mode), f"chmod {path}"))

    def prctl(self, option: int, arg2: int = 0) -> None:
        self._calls.append((_prctl, (option, arg2, 0, 0, 0), f"prctl {option}"))

    def drop_bounding(self, numbers: list) -> None:
        for number in numbers:
            self.prctl(PR_CAPBSET_DROP, number)

    def set_capabilities(self, keep: int) -> None:
        self._calls.append((_prctl, (PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl ambient"))
        self._calls.append((_capset, _capability_sets(keep), "capset"))

    def make(self) -> None:
        """Makes them all. Raises OSError at the first that fails."""
        for function, args, what in self._calls:
            if function(*args) < 0:
                check_result(-1, what)


def drop_bounding(keep: int, last: int) -> None:
    """Takes every capability up to number `last` that is not in `keep` out of the bounding set."""
    for number in range(last + 1):
        if not keep >> number & 1:
            prctl(PR_CAPBSET_DROP, number)


def last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())


class _StatFs(ctypes.Structure):
    _fields_ = [("type", ctypes.c_long), ("rest", ctypes.c_byte * 256)]


def filesystem_type(fd: int) -> int:
    """The magic number of the file system that an open file lies on."""
    buffer = _StatFs()
    check_result(_fstatfs(fd, ctypes.byref(buffer)), "fstatfs")
    return int(buffer.type)


# System call numbers of the two machines that Cloche runs on, as data.
#
# Numbers are kept as runs: `{first number: names in order}`. From 424 on the kernel gives every machine the same
# numbers.

_X86_64: dict[int, str] = {
    0: """
        read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
        rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise
        shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept
        sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt getsockopt
        clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock
        fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink
        readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times ptrace getuid
        syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid setregid getgroups setgroups
        setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending
        rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod uselib personality ustat statfs fstatfs
        sysfs getpriority setpriority sched_setparam sched_getparam sched_setscheduler sched_getscheduler
        sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock mlockall munlockall vhangup
        modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot sync acct settimeofday mount umount2
        swapon swapoff reboot sethostname setdomainname iopl ioperm create_module init_module delete_module
        get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg afs_syscall tuxcall security gettid readahead
        setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr
        lremovexattr fremovexattr tkill time futex sched_setaffinity sched_getaffinity set_thread_area io_setup
        io_destroy io_getevents io_submit io_cancel get_thread_area lookup_dcookie epoll_create epoll_ctl_old
        epoll_wait_old remap_file_pages getdents64 set_tid_address restart_syscall semtimedop fadvise64 timer_create
        timer_settime timer_gettime timer_getoverrun timer_delete clock_settime clock_gettime clock_getres
        clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes vserver mbind set_mempolicy get_mempolicy mq_open
        mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr kexec_load waitid add_key request_key keyctl
        ioprio_set ioprio_get inotify_init inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat
        fchownat futimesat newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll
        unshare set_robust_list get_robust_list splice tee sync_file_range vmsplice move_pages utimensat epoll_pwait
        signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2
        epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init
        fanotify_mark prlimit64 name_to_handle_at open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu
        process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom
        memfd_create kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2
        pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq uretprobe
    """,
}

_AARCH64: dict[int, str] = {
    0: """
        io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr
        listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd lookup_dcookie eventfd2
        epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1 inotify_add_watch inotify_rm_watch ioctl
        ioprio_set ioprio_get flock mknodat mkdirat unlinkat symlinkat linkat renameat umount2 mount pivot_root
        nfsservctl statfs fstatfs truncate ftruncate fallocate faccessat chdir fchdir chroot fchmod fchmodat fchownat
        fchown openat close vhangup pipe2 quotactl getdents64 lseek read write readv writev pread64 pwrite64 preadv
        pwritev sendfile pselect6 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat fstat sync fsync fdatasync
        sync_file_range timerfd_create timerfd_settime timerfd_gettime utimensat acct capget capset personality exit
        exit_group waitid set_tid_address unshare futex set_robust_list get_robust_list nanosleep getitimer setitimer
        kexec_load init_module delete_module timer_create timer_gettime timer_getoverrun timer_settime timer_delete
        clock_settime clock_gettime clock_getres clock_nanosleep syslog ptrace sched_setparam sched_setscheduler
        sched_getscheduler sched_getparam sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max
        sched_get_priority_min sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend
        rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority getpriority
        reboot setregid setgid setreuid setuid setresuid getresuid setresgid getresgid setfsuid setfsgid times setpgid
        getpgid getsid setsid getgroups setgroups uname sethostname setdomainname getrlimit setrlimit getrusage umask
        prctl getcpu gettimeofday settimeofday adjtimex getpid getppid getuid geteuid getgid getegid gettid sysinfo
        mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd semget semctl
        semtimedop semop shmget shmctl shmat shmdt socket socketpair bind listen accept connect getsockname getpeername
        sendto recvfrom setsockopt getsockopt shutdown sendmsg recvmsg readahead brk munmap mremap add_key request_key
        keyctl clone execve mmap fadvise64 swapon swapoff mprotect msync mlock munlock mlockall munlockall mincore
        madvise remap_file_pages mbind get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo
        perf_event_open accept4 recvmmsg
    """,
    260: """
        wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at open_by_handle_at clock_adjtime syncfs setns
        sendmmsg process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp
        getrandom memfd_create bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect
        pkey_alloc pkey_free statx io_pgetevents rseq kexec_file_load
    """,
}

_COMMON: dict[int, str] = {
    424: """
        pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig fsmount
        fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 mount_setattr
        quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret process_mrelease
        futex_waitv set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue
        statmount listmount lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal setxattrat getxattrat listxattrat
        removexattrat open_tree_attr file_getattr file_setattr
    """,
}


def _expand_numbers(*tables: dict[int, str]) -> dict[str, int]:
    runs = (run for table in tables for run in table.items())
    return {name: first + index for first, names in runs for index, name in enumerate(names.split())}


SYSCALL_NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": _expand_numbers(_X86_64, _COMMON),
    "aarch64": _expand_numbers(_AARCH64, _COMMON),
}
