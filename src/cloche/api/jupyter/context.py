"""The context of this dialect's handlers: the kernels, the sandboxes of named sessions, and errors."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import Conflict, DialectContext, json_reply
from cloche.api.http import status_of
from cloche.api.jupyter.kernels import IDLE_SECONDS, JupyterKernel, JupyterKernels, language_of
from cloche.api.jupyter.messages import PROTOCOL_VERSION
from cloche.api.named_sandboxes import NamedSandboxes
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.handle import SandboxHandle
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.languages import LANGUAGES
from cloche.model import MIB, SandboxSpec

JUPYTER_PREFIX = "/jupyter"
NOTE_KEY = "jupyter"
_SANDBOX_ID = re.compile(r"i[a-z0-9]{20}")
_SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CLIENT_VARIABLES = ("KERNEL_", "JPY_", "JUPYTER_")  # for the machine of a gateway, not for programs


class JupyterContext(DialectContext):
    """A path may begin with `/in/NAME`: then kernels and files are those of one sandbox.

    NAME is the id of a sandbox, or the name of a session, whose sandbox is made at its first use.
    """

    max_body_bytes = 4 * MIB

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        super().__init__(engine, gatekeeper, config)
        self.kernels = JupyterKernels()
        self.started_at = time.time()
        self._named = NamedSandboxes(engine, NOTE_KEY)

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return error_reply(error)

    def kernel(self, connection: HTTPConnection) -> JupyterKernel:
        """The kernel in the path. Raises KernelNotFound, and as `admit`."""
        return self.kernels.find(connection.path_params["kernel"], self.owner(connection))

    async def start_kernel(
        self, connection: HTTPConnection, name: str, env: Mapping[str, str], path: str = ""
    ) -> JupyterKernel:
        """A new kernel, in the sandbox of the path or in one of its own.

        Raises InvalidRequest for a name or variables that no kernel can have, and as `Engine.create`.
        """
        language = language_of(name)
        own = {key: each for key, each in env.items() if not key.startswith(_CLIENT_VARIABLES)}
        cwd = working_directory(env)
        handle = await self.named_handle(connection)
        if handle is None:
            sandbox = await self._create_sandbox(self.owner(connection), env=own, cwd=cwd)
            context = sandbox.default_context(language)
        else:
            sandbox = await handle.running()
            context = await sandbox.create_context(language=language, cwd=cwd)
            context.configure(own)
        kernel = JupyterKernel(LANGUAGES[language].kernel_name, sandbox.handle, context.id, own=handle is None, env=own)
        kernel.state = "idle"
        self.kernels.add(kernel)
        return kernel

    async def named_handle(self, connection: HTTPConnection) -> SandboxHandle | None:
        """The handle of the sandbox that the path names; None if it names none. Raises SandboxNotFound, Gone."""
        owner, name = self.owner(connection), connection.path_params.get("sandbox")
        if name is None:
            return None
        if _SANDBOX_ID.fullmatch(name):
            return await self.engine.handle(name, owner)
        if not _SESSION_NAME.fullmatch(name):
            raise errors.InvalidRequest("a session's name has up to 64 letters, digits, '.', '_' and '-'")
        return await self._named.find_or_create(owner, name, lambda: self._create_sandbox(owner, session=name))

    async def named_sandbox(self, connection: HTTPConnection) -> Sandbox:
        """The sandbox that the path names, running. Raises NotFound if it names none, and as `named_handle`."""
        handle = await self.named_handle(connection)
        if handle is None:
            raise errors.NotFound("files belong to a sandbox: use the base URL /jupyter/in/NAME, with any name")
        sandbox = await handle.running()
        sandbox.extend(min(IDLE_SECONDS, sandbox.record.spec.lifetime_seconds or IDLE_SECONDS))
        return sandbox

    async def _create_sandbox(
        self, owner: str, *, session: str = "", env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Sandbox:
        spec = SandboxSpec(
            owner=owner,
            env=dict(env or {}),
            cwd=cwd or SandboxSpec().cwd,
            metadata={"jupyter": session or "kernel"},
            notes={NOTE_KEY: session} if session else {},
            lifetime_seconds=min(IDLE_SECONDS, self.config.lifetime.max_seconds),
            on_deadline="pause" if session else "kill",
            auto_resume=bool(session),
        )
        return await self.engine.create(spec)

    async def kernel_info(self, kernel: JupyterKernel) -> dict[str, Any]:
        """The content of a kernel_info_reply."""
        sandbox = await kernel.sandbox()
        template = await self.engine.template(sandbox.spec.template, kernel.owner)
        about = LANGUAGES[kernel.language]
        python = kernel.language == "python"
        return {
            "status": "ok",
            "protocol_version": PROTOCOL_VERSION,
            "implementation": "cloche",
            "implementation_version": version("cloche"),
            "language_info": {
                "name": kernel.language,
                "version": template.python_version if python else "",
                "mimetype": about.mime,
                "file_extension": f".{about.extensions[0]}",
                "pygments_lexer": "ipython3" if python else kernel.language,
                "codemirror_mode": {"name": "ipython", "version": 3} if python else about.codemirror_mode,
                "nbconvert_exporter": "python" if python else "script",
            },
            "banner": f"{about.title} in Cloche's sandbox {sandbox.id}",
            "help_links": [],
            "debugger": False,
            "supported_features": [],
        }


def working_directory(env: Mapping[str, str]) -> str | None:
    """KERNEL_WORKING_DIR, if it is below the usual directory of sandboxes: gateways send one of their own machine."""
    path, usual = env.get("KERNEL_WORKING_DIR", ""), SandboxSpec().cwd
    return path if (path == usual or path.startswith(usual + "/")) and ".." not in path else None


def error_reply(error: errors.ClocheError) -> Response:
    """An error in Jupyter's format."""
    status = 409 if isinstance(error, Conflict) else 404 if isinstance(error, errors.Gone) else status_of(error)
    return json_reply({"message": str(error), "reason": error.code}, status)
