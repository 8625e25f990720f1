"""The users of a sandbox, and how a process becomes one of them."""

from __future__ import annotations

import grp
import os
import pwd

from cloche.linux import namespaces, seccomp, syscalls

UIDS = {"root": 0, "user": 1000}
HOMES = {"root": "/root", "user": "/home/user"}


class UnknownUser(LookupError):
    """A user name that this sandbox does not have."""


class Identities:
    """The users of one sandbox. With a single mapped uid, `user` and `root` are one identity with two names."""

    def __init__(self, single: bool, filter_program: bytes):
        self.single = single
        self._filter = seccomp.SeccompFilter(filter_program) if filter_program else None

    def uid(self, user: str) -> int:
        if user not in UIDS:
            raise UnknownUser(f"no user {user!r} in this sandbox: use 'user' or 'root'")
        return UIDS["user"] if self.single else UIDS[user]

    def ids(self, user: str) -> tuple:
        """Uid and gid of files that shall be `user`'s. Where there is one identity only, they are its own."""
        uid = self.uid(user)
        return (os.geteuid(), os.getegid()) if self.single else (uid, uid)

    def act_on_files_as(self, user: str) -> None:
        """File work of this process is done with `user`'s rights from now on, until `act_as_init`."""
        if not self.single:
            syscalls.set_fs_identity(self.uid(user), self.uid(user))

    def act_as_init(self) -> None:
        if not self.single:
            syscalls.set_fs_identity(0, 0)

    def become(self, user: str) -> None:
        """Turns the calling process, a fresh child of init, into one of `user`'s for good."""
        uid = self.uid(user)
        if not self.single:
            os.setgroups([uid])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # or it could not read its own /proc/self
        if self.single and self._filter:
            self._appear_as(user)
            syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
            self._filter.install()

    def confine_fork(self) -> None:
        """In a fork of init that keeps init's rights: it has init's filter, too, where init itself can have none."""
        if self.single and self._filter:
            syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
            self._filter.install()

    def _appear_as(self, user: str) -> None:
        """With one uid, root is a name: a user namespace of its own in which that uid reads 0."""
        if user == "root":
            syscalls.unshare(namespaces.NEWUSER)
            namespaces.write_maps("self", [(0, 1000, 1)], [(0, 1000, 1)], deny_setgroups=True)
            syscalls.drop_bounding(0, syscalls.last_capability())  # unshare(user) had filled it again
        syscalls.set_capabilities(0)


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
