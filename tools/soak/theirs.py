"""Operations by others' protocols: E2B's and OpenAI's own clients, LibreChat's and OpenSandbox's requests."""

from __future__ import annotations

import json
import signal
from typing import Any

import httpx2
from e2b.sandbox.commands.command_handle import PtySize
from e2b_code_interpreter import AsyncSandbox
from openai import AsyncOpenAI

from soak.book import Lost, Wrong
from soak.visit import LIFE_SECONDS, Operation, Visit, check

CODE_TOOL: dict[str, Any] = {"type": "code_interpreter", "container": {"type": "auto"}}
KILLED = 128 + signal.SIGKILL
SAID_LOST = "Kernel restarted: sandbox lost"  # so the model is told, which says what it hears
OPENSANDBOX = {"image": {"uri": "python:3.12"}, "timeout": 300, "resourceLimits": {"cpu": "1", "memory": "1Gi"}}


async def e2b_code(visit: Visit) -> None:
    number = visit.number()
    box = await AsyncSandbox.create(timeout=int(LIFE_SECONDS), **visit.e2b)
    try:
        _e2b_ran(await box.run_code(f"x = {number}"), None)
        context = await box.create_code_context(cwd="/tmp")
        _e2b_ran(await box.run_code("x = 1\nx", context=context), "1")
        _e2b_ran(await box.run_code("x"), str(number))
    finally:
        await box.kill()


def _e2b_ran(execution: Any, wanted: str | None) -> None:
    if execution.error is not None and "kernel" in str(execution.error.value).lower():
        raise Lost(str(execution.error.value))
    check((execution.error, execution.text), (None, wanted), "E2B's execution")


async def e2b_files_and_commands(visit: Visit) -> None:
    content = visit.dice.randbytes(visit.dice.choice([100, 200_000, 2_000_000]))
    box = await AsyncSandbox.create(timeout=int(LIFE_SECONDS), **visit.e2b)
    try:
        await box.files.write("/home/user/a.bin", content)
        check(bytes(await box.files.read("/home/user/a.bin", format="bytes")) == content, True, "E2B's file")
        ran = await box.commands.run("wc -c < a.bin", cwd="/home/user")
        check(ran.stdout.strip(), str(len(content)), "a file's length")
    finally:
        await box.kill()


async def e2b_terminal(visit: Visit) -> None:
    box = await AsyncSandbox.create(timeout=int(LIFE_SECONDS), **visit.e2b)
    try:
        shown = bytearray()
        terminal = await box.pty.create(PtySize(cols=80, rows=24), on_data=shown.extend)
        number = visit.number()
        await box.pty.send_stdin(terminal.pid, f"echo n=$(({number} + 1))\nexit\n".encode())
        await terminal.wait()
        check(f"n={number + 1}" in shown.decode(errors="replace"), True, "what the terminal shows")
    finally:
        await box.kill()


async def e2b_pause(visit: Visit) -> None:
    box = await AsyncSandbox.create(timeout=int(LIFE_SECONDS), **visit.e2b)
    try:
        _e2b_ran(await box.run_code("x = 5"), None)
        await box.pause()
        again = await AsyncSandbox.connect(box.sandbox_id, timeout=int(LIFE_SECONDS), **visit.e2b)
        _e2b_ran(await again.run_code("x"), "5")
    finally:
        await box.kill()


def _openai(visit: Visit) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{visit.url}/v1", api_key=visit.key, max_retries=0, timeout=60)


async def openai_response(visit: Visit) -> None:
    """A turn of the gateway, with a model that runs the code that it is sent; streamed, every other time."""
    number = visit.number()
    asked = {"model": "cloche/echo", "input": f"```python\nprint({number} + 1)\n```", "tools": [CODE_TOOL]}
    async with _openai(visit) as client:
        if visit.dice.random() < 0.5:
            answer = await client.responses.create(**asked)
        else:
            async with client.responses.stream(**asked) as stream:
                async for _ in stream:
                    pass
                answer = await stream.get_final_response()
        try:
            if answer.status != "completed":
                raise Lost(f"response is {answer.status}: {answer.error}")
            if SAID_LOST in answer.output_text:
                raise Lost(answer.output_text)
            if str(number + 1) not in answer.output_text:
                raise Wrong(f"the answer is {answer.output_text[:200]!r}")
        finally:
            await client.responses.delete(answer.id)
            for item in answer.output:
                if item.type == "code_interpreter_call":
                    await client.containers.delete(item.container_id)


async def openai_left_stream(visit: Visit) -> None:
    """Whoever leaves a response's stream in the middle keeps nobody from anything."""
    asked = {"model": "cloche/echo", "input": "```python\nimport time; time.sleep(5)\n```", "tools": [CODE_TOOL]}
    async with _openai(visit) as client:
        container = await client.containers.create(name="left")
        try:
            asked["tools"] = [{"type": "code_interpreter", "container": container.id}]
            stream = await client.responses.create(**asked, stream=True, store=False)
            async for event in stream:
                if event.type == "response.code_interpreter_call.in_progress":
                    break
            await stream.close()
        finally:
            await client.containers.delete(container.id)


async def openai_chat(visit: Visit) -> None:
    number = visit.number()
    async with _openai(visit) as client:
        answer = await client.chat.completions.create(
            model="cloche/echo", messages=[{"role": "user", "content": f"Hello {number}"}]
        )
    check(str(number) in (answer.choices[0].message.content or ""), True, "the echo")


async def openai_container(visit: Visit) -> None:
    content = visit.dice.randbytes(50_000)
    async with _openai(visit) as client:
        container = await client.containers.create(name=visit.name())
        try:
            file = await client.containers.files.create(container.id, file=("a.bin", content))
            listed = [each.id async for each in await client.containers.files.list(container.id)]
            check(listed, [file.id], "files of the container")
            read = await client.containers.files.content.retrieve(file.id, container_id=container.id)
            check(read.content == content, True, "a container's file")
        finally:
            await client.containers.delete(container.id)


async def openai_file(visit: Visit) -> None:
    content = visit.dice.randbytes(20_000)
    async with _openai(visit) as client:
        file = await client.files.create(file=("b.bin", content), purpose="user_data")
        try:
            check((await client.files.retrieve(file.id)).bytes, len(content), "bytes")
        finally:
            await client.files.delete(file.id)


async def librechat_exec(visit: Visit) -> None:
    number = visit.number()
    async with visit.http("/librechat/v1") as client:
        answer = await client.post("/exec", json={"lang": "py", "code": f"print({number} * 3)"})
        check(_librechat_ran(answer)["stdout"], f"{number * 3}\n", "LibreChat's answer")


def _librechat_ran(answer: httpx2.Response) -> dict[str, Any]:
    said: dict[str, Any] = answer.raise_for_status().json()
    if said["signal"] is not None or said["code"] == KILLED:
        raise Lost(f"a program of LibreChat's: {said['signal']}")
    check(said["code"], 0, "the status of LibreChat's program")
    return said


async def librechat_file(visit: Visit) -> None:
    """A file goes in, a program changes it, the new one comes out."""
    content = str(visit.number()).encode()
    async with visit.http("/librechat/v1") as client:
        sent = await client.post("/upload", data={"kind": "user", "id": "u"}, files={"file": ("in.txt", content)})
        (file,) = sent.raise_for_status().json()["files"]
        session = sent.json()["storage_session_id"]
        told = {"storage_session_id": session, "id": file["fileId"], "name": "in.txt", "kind": "user"}
        code = "open('/mnt/data/out.txt', 'w').write(open('/mnt/data/in.txt').read() * 2)"
        files = [{**told, "resource_id": "u"}]
        answer = await client.post("/exec", json={"lang": "py", "code": code, "files": files})
        made = [each for each in _librechat_ran(answer)["files"] if each["name"] == "out.txt"]
        check(len(made), 1, "files that the program made")
        for each, wanted in ((told, content), (made[0], content * 2)):
            path = f"{each['storage_session_id']}/{each['id']}"
            read = await client.get(f"/download/{path}", params={"kind": "user", "id": "u"})
            check(read.raise_for_status().content, wanted, "a downloaded file")
            gone = await client.delete(f"/files/{path}", params={"kind": "user", "id": "u"})
            gone.raise_for_status()


async def opensandbox_code(visit: Visit) -> None:
    number = visit.number()
    async with visit.http("/opensandbox/v1", "OPEN-SANDBOX-API-KEY") as client:
        made = (await client.post("/sandboxes", json=OPENSANDBOX)).raise_for_status().json()
        try:
            door = (await client.get(f"/sandboxes/{made['id']}/endpoints/44772")).raise_for_status().json()
            body = {"code": f"print({number} + 2)", "context": {"language": "python"}}
            url = f"http://{door['endpoint']}/code"
            answer = (await client.post(url, json=body, headers=door["headers"])).raise_for_status()
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
            said = "".join(event.get("text", "") for event in events if event["type"] == "stdout")
            if events[-1]["type"] == "error":
                raise Lost(str(events[-1]))
            check(said, f"{number + 2}\n", "OpenSandbox's output")
        finally:
            (await client.delete(f"/sandboxes/{made['id']}")).raise_for_status()


OPERATIONS: dict[Operation, int] = {
    e2b_code: 4,
    e2b_files_and_commands: 3,
    e2b_terminal: 2,
    e2b_pause: 1,
    openai_response: 4,
    openai_left_stream: 1,
    openai_chat: 2,
    openai_container: 2,
    openai_file: 2,
    librechat_exec: 4,
    librechat_file: 2,
    opensandbox_code: 3,
}
