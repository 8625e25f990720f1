"""Defaults for the programs of one sandbox: their user, environment, directory and limits."""

from __future__ import annotations

import os

from cloche.guest.init import identity


class InvalidGuestPath(ValueError):
    code = "invalid_path"


class Defaults:
    """Settings of everything that starts from now on, unless its request says otherwise."""

    def __init__(self):
        self.user = "user"
        self.env: dict = {}
        self.inherited: dict = {}  # what os.environ holds already in every fork of the zygote
        self._adopted_by: str | None = None
        self.places: dict = {}  # without walls, directories of the host that stand for those of a sandbox
        self.cwd = "/mnt/data"
        self.processes = None
        self.data_bytes = None
        self.memory_bytes = None  # of the sandbox, for interpreters that bound themselves
        self.open_files = None
        self.reserved_bytes = None  # see `limits`

    def limits(self) -> dict:
        """The limits of a program, for another process that starts it in init's stead."""
        return {
            "processes": self.processes,
            "data_bytes": self.data_bytes,
            "open_files": self.open_files,
            "reserved_bytes": self.reserved_bytes,
        }

    def take_limits(self, limits: dict) -> None:
        self.processes, self.data_bytes = limits["processes"], limits["data_bytes"]
        self.open_files, self.reserved_bytes = limits["open_files"], limits["reserved_bytes"]

    def environment(self, user: str, extra: dict) -> dict:
        home = self.place(identity.HOMES.get(user, "/"))
        return {**self.env, "HOME": home, "USER": user, "LOGNAME": user, **extra}

    def place(self, path: str) -> str:
        """The host path of a path inside the sandbox. With walls that is the path itself."""
        for inside, outside in self.places.items():
            if path == inside or path.startswith(inside + "/"):
                return outside + path[len(inside) :]
        return path

    @property
    def root(self) -> str:
        """The directory that holds all of the sandbox's own files. Without walls the host removes it on cleanup."""
        return self.places.get("/home/user", "/")

    def first_kernel_settings(self) -> tuple[str, str, dict]:
        """User, working directory and environment of the first kernel, which starts before anything is configured."""
        known = self.user == self._adopted_by and not self.places
        return self.user, self.place(self.cwd), self.inherited if known else self.environment(self.user, {})

    def adopt(self, env: dict) -> None:
        """Makes `env` the base, and the environment of a `user` program that of this process and its forks."""
        self.env, self._adopted_by = env, self.user
        self.inherited = self.environment(self.user, {})
        os.environ.clear()
        os.environ.update(self.inherited)

    def path(self, path) -> str:
        """`path` as an absolute one, below the working directory if relative. `..` is the sandbox's own affair."""
        if not isinstance(path, str) or not path or "\0" in path:
            raise InvalidGuestPath(f"{path!r} is not a path")
        return self.place(os.path.normpath(os.path.join(self.cwd, path)))
