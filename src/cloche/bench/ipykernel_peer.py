"""The peer: a plain ipykernel, driven by jupyter_client's blocking client.

Both are imported when they are used: they are not dependencies of ours.
"""

from __future__ import annotations

import importlib.util
import subprocess
import time
from types import TracebackType
from typing import Any

from cloche.bench.samples import expect_answer

PEER_PACKAGES = ("ipykernel", "jupyter_client", "pandas", "matplotlib")
BENCH_ADVICE = "pip install 'cloche[bench]'"
TRANSPORTS = ("tcp", "ipc")
KERNEL_START_SECONDS = 120.0
KERNEL_ANSWER_SECONDS = 60.0


def missing_packages() -> list[str]:
    """The peer's packages that are not installed."""
    return [name for name in PEER_PACKAGES if importlib.util.find_spec(name) is None]


class IpykernelProcess:
    """One ipykernel process, ready. Use with `with`.

    `lean` leaves out the usual `wait_for_ready`, and waits only for the kernel's message that its output channel
    is connected: nothing that still gets every answer is faster.
    """

    def __init__(self, transport: str = "tcp", *, lean: bool = False):
        from jupyter_client.manager import KernelManager

        self._manager: Any = KernelManager(transport=transport)
        self._manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._client: Any = self._manager.blocking_client()
        try:
            self._client.start_channels()
            if lean:
                self._wait_for_welcome()
            else:
                self._client.wait_for_ready(timeout=KERNEL_START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> IpykernelProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return int(self._manager.provisioner.pid)

    def first(self, code: str, mime: str) -> Any:
        """Executes, and returns the value of that MIME type when it arrives."""
        request = self._client.execute(code, store_history=True)
        while True:
            message = self._next_message(request)
            content = message["content"]
            expect_answer(message["msg_type"] != "error", content)
            if mime in content.get("data", {}):
                return content["data"][mime]
            expect_answer(content.get("execution_state") != "idle", f"no {mime}")

    def run(self, code: str) -> list[dict[str, Any]]:
        """Executes to the end, idle and reply; returns its messages, without its changes of state."""
        request = self._client.execute(code, store_history=True)
        said = list(self._until_idle(request))
        reply = self._client.get_shell_msg(timeout=KERNEL_ANSWER_SECONDS)
        while reply["parent_header"].get("msg_id") != request:
            reply = self._client.get_shell_msg(timeout=KERNEL_ANSWER_SECONDS)
        expect_answer(reply["content"]["status"] == "ok", reply["content"])
        return said

    def interrupt_seconds(self, code: str) -> float:
        """The time from the interrupt of a program that has printed something until its kernel is idle."""
        request = self._client.execute(code)
        while self._next_message(request)["msg_type"] != "stream":
            pass
        began = time.perf_counter()
        self._manager.interrupt_kernel()
        self._until_idle(request)
        return time.perf_counter() - began

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def _until_idle(self, request: str) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        while True:
            message = self._next_message(request)
            if message["content"].get("execution_state") == "idle":
                return said
            if message["msg_type"] != "status":
                said.append(message["content"])

    def _next_message(self, request: str) -> Any:
        while True:
            message = self._client.get_iopub_msg(timeout=KERNEL_ANSWER_SECONDS)
            if message["parent_header"].get("msg_id") == request:
                return message

    def _wait_for_welcome(self) -> None:
        while self._client.get_iopub_msg(timeout=KERNEL_START_SECONDS)["msg_type"] != "iopub_welcome":
            pass
