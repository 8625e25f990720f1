"""The sessions of a pool: a sandbox for each identifier, made at its first use."""

from __future__ import annotations

import re

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import DialectContext, NotSupported, json_reply
from cloche.api.http import status_of
from cloche.api.named_sandboxes import NamedSandboxes
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.handle import SandboxHandle
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import MIB, SandboxSpec, Template

DEFAULT_POOL = "python"
IDLE_SECONDS = 3600.0  # how long a session lives after its last use
NOTE_KEY = "aca"
_IDENTIFIER = re.compile(r"[\x21-\x7e]{1,128}")

# AutoGen asks for the installed packages with setuptools' old module, which new versions do not have.
_OLD_MODULE = "pkg_resources"
_OLD_MODULE_SOURCE = """\
from importlib.metadata import distributions
from types import SimpleNamespace

working_set = [SimpleNamespace(project_name=each.name, key=each.name.lower(), version=each.version)
               for each in distributions() if each.name]
"""


class AzureContext(DialectContext):
    """A pool is a template, by its name in the path; the session is the `identifier` of the query."""

    max_body_bytes = 16 * MIB

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        super().__init__(engine, gatekeeper, config)
        self._named = NamedSandboxes(engine, NOTE_KEY)

    async def sandbox(self, connection: HTTPConnection) -> Sandbox:
        """The session's sandbox, running. It lives for another hour. Raises as `Engine.create`, and InvalidRequest."""
        owner, pool, name = self.owner(connection), *_session_name(connection)
        handle = await self._named.find_or_create(owner, name, lambda: self._create(owner, pool, name))
        sandbox = await handle.running()
        sandbox.extend(self._idle_seconds)
        return sandbox

    async def find_session(self, connection: HTTPConnection) -> SandboxHandle | None:
        """The handle of the session's sandbox, if it has one."""
        owner, (_, name) = self.owner(connection), _session_name(connection)
        return await self._named.find(owner, name)

    @property
    def _idle_seconds(self) -> float:
        return min(IDLE_SECONDS, self.config.lifetime.max_seconds)

    async def _create(self, owner: str, pool: str, name: str) -> Sandbox:
        sandbox = await self.engine.create(
            SandboxSpec(template=pool, owner=owner, lifetime_seconds=self._idle_seconds, notes={NOTE_KEY: name})
        )
        template = await self.engine.template(pool, owner)
        if not _has_old_module(template):
            version = ".".join(template.python_version.split(".")[:2])
            place = f"/home/user/.local/lib/python{version}/site-packages/{_OLD_MODULE}.py"
            await sandbox.files.write(place, _OLD_MODULE_SOURCE)
        return sandbox

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return error_reply(
            501 if isinstance(error, NotSupported) else status_of(error), type(error).__name__, str(error)
        )


def _session_name(connection: HTTPConnection) -> tuple[str, str]:
    """The pool, and the name of the session in it. Raises InvalidRequest."""
    pool, identifier = connection.path_params.get("pool", DEFAULT_POOL), connection.query_params.get("identifier", "")
    if not _IDENTIFIER.fullmatch(identifier):
        raise errors.InvalidRequest("identifier must have 1 to 128 printable ASCII characters without spaces")
    return pool, f"{pool}/{identifier}"


def _has_old_module(template: Template) -> bool:
    versions = (each.removeprefix("setuptools==") for each in template.packages if each.startswith("setuptools=="))
    return any(int(each.split(".")[0]) < 81 for each in versions if each.split(".")[0].isdigit())


def error_reply(status: int, code: str, message: str) -> Response:
    return json_reply({"error": {"code": code, "message": message, "target": None, "details": []}}, status)
