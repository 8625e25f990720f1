"""Open WebUI's code interpreter in `jupyter` mode: the calls of its `JupyterCodeExecuter`, one after another.

Its package needs gigabytes, so its class is not imported: each request below is one that it sends, with the fields that
it sends, and its way to read the answers.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from types import TracebackType
from typing import Any

import httpx2
import pytest
import websockets
from tests.conftest import RunningServer


class JupyterCodeExecuter:
    """One execution: sign in, a kernel, its WebSocket, DELETE."""

    def __init__(self, server: RunningServer, code: str, *, password: bool = False, timeout: float = 60):
        self._base = f"{server.url.replace('127.0.0.1', 'localhost')}/jupyter/"
        self._code = code
        self._timeout = timeout
        self._password = server.key if password else ""
        self._params = {} if password else {"token": server.key}
        self._http = httpx2.AsyncClient(base_url=self._base, timeout=60)
        self.kernel = ""
        self.stdout = self.stderr = ""
        self.result: list[str] = []

    async def __aenter__(self) -> JupyterCodeExecuter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        answer = await self._http.delete(f"api/kernels/{self.kernel}", params=self._params)
        answer.raise_for_status()
        await self._http.aclose()

    async def run(self) -> JupyterCodeExecuter:
        if self._password:
            await self._sign_in()
        answer = await self._http.post("api/kernels", params=self._params)
        answer.raise_for_status()
        self.kernel = answer.json()["id"]
        await self._execute()
        return self

    async def _sign_in(self) -> None:
        xsrf = (await self._http.get("login")).cookies["_xsrf"]
        self._http.headers["X-XSRFToken"] = xsrf
        answer = await self._http.post("login", data={"_xsrf": xsrf, "password": self._password})
        assert answer.status_code < 400, answer.text

    async def _execute(self) -> None:
        query = "".join(f"?{name}={value}" for name, value in self._params.items())
        address = f"{self._base.replace('http', 'ws', 1)}api/kernels/{self.kernel}/channels{query}"
        cookies = "; ".join(f"{each.name}={each.value}" for each in self._http.cookies.jar)
        headers = {"Cookie": cookies, **dict(self._http.headers)} if self._password else {}
        for name in ("host", "accept", "accept-encoding", "connection", "user-agent"):
            headers.pop(name, None)
        async with websockets.connect(address, additional_headers=headers) as socket:
            await self._execute_in_jupyter(socket)

    async def _execute_in_jupyter(self, socket: Any) -> None:
        id = uuid.uuid4().hex
        header = {"msg_id": id, "msg_type": "execute_request", "username": "user", "session": uuid.uuid4().hex}
        content = {"code": self._code, "silent": False, "store_history": True, "user_expressions": {}}
        message = {
            "header": {**header, "date": "", "version": "5.3"},
            "parent_header": {},
            "metadata": {},
            "content": {**content, "allow_stdin": False, "stop_on_error": True},
            "channel": "shell",
        }
        await socket.send(json.dumps(message))
        while True:
            try:
                said = json.loads(await asyncio.wait_for(socket.recv(), self._timeout))
            except TimeoutError:
                self.stderr += "\nExecution timed out."
                return
            if said.get("parent_header", {}).get("msg_id") == id and self._take(said.get("msg_type"), said["content"]):
                return

    def _take(self, msg_type: str, content: dict[str, Any]) -> bool:
        """Whether it was the last message."""
        match msg_type:
            case "stream":
                self.stdout += content["text"] if content["name"] == "stdout" else ""
                self.stderr += content["text"] if content["name"] == "stderr" else ""
            case "execute_result" | "display_data":
                data = content["data"]
                if "image/png" in data:
                    self.result.append(f"data:image/png;base64,{data['image/png']}")
                elif "text/plain" in data:
                    self.result.append(data["text/plain"])
            case "error":
                self.stderr += "\n".join(content["traceback"])
            case "status":
                return bool(content["execution_state"] == "idle")
        return False


@pytest.mark.parametrize("password", [False, True], ids=["token", "password"])
async def test_code_gives_output_values_and_pictures(server: RunningServer, password: bool):
    code = "import matplotlib.pyplot as plt\nplt.plot([1])\nplt.show()\nprint('hi')\n[1, 2]"
    async with JupyterCodeExecuter(server, code, password=password) as executer:
        ran = await executer.run()
    assert (ran.stdout, ran.stderr) == ("hi\n", "")
    assert ran.result[0].startswith("data:image/png;base64,iVBOR")
    assert ran.result[1] == "[1, 2]"


async def test_an_error_is_its_traceback(server: RunningServer):
    async with JupyterCodeExecuter(server, "1/0") as executer:
        assert "ZeroDivisionError: division by zero" in (await executer.run()).stderr


async def test_a_time_out_leaves_nothing_behind(server: RunningServer):
    """It sends no interrupt, only the DELETE."""
    headers = {"x-api-key": server.key}
    async with JupyterCodeExecuter(server, "while True: pass", timeout=0.5) as executer:
        assert (await executer.run()).stderr == "\nExecution timed out."
    known = httpx2.get(f"{server.url}/jupyter/api/kernels", headers=headers).json()
    assert executer.kernel not in {each["id"] for each in known}
