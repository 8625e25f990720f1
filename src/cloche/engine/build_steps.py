"""The steps of a template's build, done inside a sandbox and with no rights but those of its users."""

from __future__ import annotations

import posixpath
import re
import secrets
from pathlib import Path
from typing import Literal

from cloche import errors
from cloche.engine.build_log import BuildLog, Lines
from cloche.engine.process import Exited
from cloche.engine.sandbox import Sandbox
from cloche.events import Output
from cloche.model import Launch, Struct, User, check_env
from cloche.store.build_files import BuildFiles

StepKind = Literal["RUN", "COPY", "ENV", "WORKDIR", "USER"]

STEP_SECONDS = 1800.0
SHELL = ("/bin/bash", "-l", "-c")
WRITABLE = "/home/user, /mnt/data, /app, /tmp, /var/tmp and /root"

# A program of the guest's, which every sandbox could run: by its text, as not every backend shows it by a path.
_COPYING = (Path(__file__).parent.parent / "guest" / "copying.py").read_text("utf-8")
_PLAIN = {"PATH": "/opt/cloche/front/bin:/opt/cloche/env/bin:/usr/local/bin:/usr/bin:/bin"}  # whatever steps have set
_USERS: dict[str, User] = {"user": "user", "1000": "user", "root": "root", "0": "root"}
_IDS = {"user": 1000, "root": 0}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class Step(Struct):
    kind: StepKind
    args: tuple[str, ...]
    files: str | None = None  # of a COPY: the client's digest of what is copied


class Workshop:
    """A sandbox in which steps are done one after the other: each sees what those before have set."""

    def __init__(self, sandbox: Sandbox, owner: str, files: BuildFiles, log: BuildLog, begin: Launch):
        self._sandbox = sandbox
        self._owner = owner
        self._files = files
        self._log = log
        self.user = begin.user
        self.cwd = begin.cwd
        self.env: dict[str, str] = {}  # that steps have set

    async def do(self, step: Step, name: str) -> None:
        """Raises TemplateBuildFailed; Gone where the sandbox has ended."""
        match step.kind:
            case "RUN":
                await self._run(step.args[0], _user(step.args[1], step.args[0]) if step.args[1:] else self.user, name)
            case "COPY":
                await self._copy(step, name)
            case "ENV":
                await self._set_env(step.args)
            case "WORKDIR":
                await self._set_cwd(step.args[0])
            case "USER":
                self.user = _user(step.args[0])

    async def _run(self, command: str, user: User, name: str) -> None:
        exited = await self._watch((*SHELL, command), user, self.env, name)
        if exited.outcome != "ok" or exited.exit_code != 0:
            raise errors.TemplateBuildFailed(f"failed to run command '{command[:2000]}': {_how(exited)}")

    async def _watch(self, argv: tuple[str, ...], user: User, env: dict[str, str], name: str) -> Exited:
        process = await self._sandbox.commands.start(
            argv, user=user, env=env, cwd=self.cwd, timeout_seconds=STEP_SECONDS
        )
        lines = Lines(self._log, name)
        async with process:
            async for event in process:
                if isinstance(event, Output):
                    lines.add(event.stream, event.text)
        lines.end()
        return process.exited or Exited(exit_code=-1, outcome="died")

    async def _copy(self, step: Step, name: str) -> None:
        source, target = step.args[0], self._absolute(step.args[1])
        user, _, _group = (step.args[2] if step.args[2:] else "").partition(":")
        mode = step.args[3] if step.args[3:] else ""
        assert step.files is not None
        archive = f"/tmp/.cloche-copy-{secrets.token_hex(8)}"
        try:
            await self._sandbox.files.write(
                archive, await self._files.chunks(self._owner, step.files), user="root", mode=0o600
            )
            uid = str(_IDS[_user(user) if user else self.user])
            program = ("python3", "-I", "-c", _COPYING)
            exited = await self._watch((*program, archive, source, target, uid, mode), "root", _PLAIN, name)
        except errors.FileNotFound:
            said = f"the files of COPY {source} were not uploaded, or are no longer kept: build again"
            raise errors.TemplateBuildFailed(said) from None
        finally:
            await self._discard(archive)
        if exited.exit_code != 0:
            raise errors.TemplateBuildFailed(
                f"failed to copy '{source}' to '{target}': {_how(exited)}; {WRITABLE} can be written"
            )

    async def _discard(self, archive: str) -> None:
        try:
            await self._sandbox.files.remove(archive, user="root")
        except (errors.NotFound, errors.FileError, errors.Gone):
            pass  # it never came, or the sandbox is gone with it

    async def _set_env(self, args: tuple[str, ...]) -> None:
        for name, value in zip(args[::2], args[1::2], strict=True):
            self.env = {**self.env, name: await self._expanded(value)}
            check_env(self.env)

    async def _set_cwd(self, path: str) -> None:
        target = self._absolute(await self._expanded(path))
        try:
            await self._sandbox.files.make_dir(target, user="root", owner=self.user)
        except errors.FileError as error:
            raise errors.TemplateBuildFailed(f"failed to create workdir: {error}; {WRITABLE} can be written") from None
        self.cwd = target

    async def _expanded(self, text: str) -> str:
        """With the values of variables that there are; what only looks like one stays as it is."""
        if "$" not in text:
            return text
        found = await self._sandbox.commands.run(["env", "-0"], user=self.user, env=self.env, cwd=self.cwd)
        known = dict(pair.partition("=")[::2] for pair in found.stdout.split("\0") if pair)
        return _VARIABLE.sub(lambda match: known.get(match[1] or match[2], match[0]), text)

    def _absolute(self, path: str) -> str:
        """A trailing slash is kept: to a copy it says that a directory is meant."""
        home = "/root" if self.user == "root" else "/home/user"
        if path == "~" or path.startswith("~/"):
            path = home + path[1:]
        joined = posixpath.normpath(posixpath.join(self.cwd, path))
        return joined + "/" if path.endswith("/") and joined != "/" else joined


def _user(name: str, command: str | None = None) -> User:
    if name in _USERS:
        return _USERS[name]
    what = f"invalid username: '{name}'"
    if command is not None:  # in the words that E2B's clients know
        what = f"failed to run command '{command[:2000]}': command failed: unauthenticated: {what}"
    raise errors.TemplateBuildFailed(f"{what} (a sandbox has the users user and root)")


def _how(exited: Exited) -> str:
    if exited.outcome == "ok":
        return f"exit status {exited.exit_code}"
    return exited.outcome.replace("_", " ") + (f" ({exited.reason})" if exited.reason else "")
