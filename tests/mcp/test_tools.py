"""Every tool, driven by the official client over both transports."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from tests.mcp.conftest import Connecting, House, over_http, over_stdio, words

WHEEL = """
import zipfile
with zipfile.ZipFile('/mnt/data/told-1.0-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('told.py', 'word = "installed"')
    wheel.writestr('told-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: told\\nVersion: 1.0\\n')
    wheel.writestr('told-1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr('told-1.0.dist-info/RECORD', '')
"""
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Driven:
    """A client that remembers which tools it called. Answers of ours that something failed are failures of the test."""

    def __init__(self, client: Client):
        self.client = client
        self.called: set[str] = set()

    async def __call__(self, name: str, /, **arguments: Any) -> Any:
        self.called.add(name)
        result = await self.client.call_tool(name, arguments)
        assert not result.is_error, words(result)
        return result

    async def given(self, name: str, /, **arguments: Any) -> Any:
        return (await self(name, **arguments)).structured_content


@pytest.mark.parametrize("behind", ["engine of its own", pytest.param("server", marks=pytest.mark.long)])
async def test_the_official_client_drives_every_tool(house: House, behind: str):
    """Over stdio with an engine of its own, and over HTTP."""
    connecting = over_http(house) if behind == "server" else over_stdio(house, "--alone")
    async with connecting() as client:
        driven = Driven(client)
        for part in (code, contexts, going_back, commands, packages, processes, files, sandboxes, snapshots):
            await part(driven)
        listed = (await client.list_tools()).tools
    assert driven.called == {each.name for each in listed}
    assert all(each.input_schema["type"] == "object" and each.description for each in listed)
    shapes = [shape for each in listed for shape in each.input_schema.get("properties", {}).values()]
    assert all(part.keys() & {"type", "$ref"} for shape in shapes for part in shape.get("anyOf", [shape]))


async def code(driven: Driven) -> None:
    await driven("run_code", code="kept = 20")
    ran = await driven("run_code", code="print('said'); kept + 1")
    assert words(ran) == "said\n\n21"
    assert ran.structured_content["outcome"] == "ok"
    for language, program in (("javascript", "const a = [2, 3]; a.length"), ("bash", "echo $((1 + 1))")):
        assert "2" in words(await driven("run_code", code=program, language=language))
    typed = await driven("run_code", code="const b: number = 40 + 2; b", language="typescript")
    assert "42" in words(typed)
    asked = await driven("run_code", code="import os; input() + os.environ['WHO']", input=["hello "], env={"WHO": "me"})
    assert "hello me" in words(asked)


async def contexts(driven: Driven) -> None:
    made = await driven.given("create_context", language="python", cwd="/tmp")
    assert "NameError" in words(await driven("run_code", code="kept", context=made["id"]))
    listed = await driven.given("list_contexts")
    assert {"default", made["id"]} <= {each["id"] for each in listed["contexts"]}
    await driven("remove_context", context=made["id"])
    variables = await driven.given("list_variables")
    assert {"name": "kept", "type": "int"}.items() <= variables["variables"][0].items()
    running = asyncio.create_task(driven("run_code", code="print('on'); import time; time.sleep(100)"))
    while not (await driven.given("interrupt_context"))["done"]:
        await asyncio.sleep(0.02)
    assert (await running).structured_content["outcome"] in ("interrupted", "raised")
    await driven("restart_context")
    assert "NameError" in words(await driven("run_code", code="kept"))


async def going_back(driven: Driven) -> None:
    await driven("run_code", code="state = 'before'")
    mark = await driven.given("checkpoint")
    await driven("run_code", code="state = 'after'")
    await driven("rollback", checkpoint=mark["checkpoint"])
    assert "before" in words(await driven("run_code", code="state"))


async def commands(driven: Driven) -> None:
    done = await driven("run_command", command="cat; echo no >&2; exit 3", stdin="read", cwd="/tmp")
    assert done.structured_content["exit_code"] == 3
    assert "read" in words(done) and "stderr:\nno" in words(done)


async def packages(driven: Driven) -> None:
    await driven("run_code", code=WHEEL)
    done = await driven.given("install_packages", packages=["told-1.0-py3-none-any.whl"])
    assert done["exit_code"] == 0, done
    assert "installed" in words(await driven("run_code", code="import told; told.word"))
    missing = await driven.given("install_packages", packages=["no-such-thing"])
    assert missing["exit_code"] != 0


async def processes(driven: Driven) -> None:
    begun = await driven.given("start_process", command="echo begun; read line; echo got $line; sleep 100")
    id = begun["process"]["process"]
    assert "begun" in await until_written(driven, id, "begun")
    await driven("write_process", process=id, text="this\n")
    assert "got this" in await until_written(driven, id, "got this")
    assert id in {each["process"] for each in (await driven.given("list_processes"))["processes"]}
    killed = await driven.given("kill_process", process=id)
    assert not killed["process"]["running"]


async def until_written(driven: Driven, id: str, what: str) -> str:
    seen = ""
    while what not in seen:
        read = await driven.given("read_process", process=id, wait_seconds=20)
        assert read["process"]["running"] or what in seen + read.get("output", "")
        seen += read.get("output", "")
    return seen


async def files(driven: Driven) -> None:
    await driven("write_file", path="notes/a.txt", text="one\ntwo\nthree\n")
    part = await driven("read_file", path="/mnt/data/notes/a.txt", offset=1, lines=1)
    assert words(part) == "two\n" and part.structured_content["lines"] == 3
    await driven("upload_file", path="pixel.png", base64=base64.b64encode(PIXEL).decode())
    picture = (await driven("read_file", path="pixel.png")).content[0]
    assert (picture.type, picture.mime_type, base64.b64decode(picture.data)) == ("image", "image/png", PIXEL)
    fetched = (await driven("download_file", path="notes/a.txt")).content[0].resource
    assert base64.b64decode(fetched.blob) == b"one\ntwo\nthree\n"
    await driven("move_file", path="notes/a.txt", to="notes/b.txt")
    listed = await driven.given("list_files", depth=2)
    assert {"/mnt/data/notes/b.txt", "/mnt/data/pixel.png"} <= {each["path"] for each in listed["files"]}
    await driven("delete_file", path="notes")
    assert "notes" not in words(await driven("list_files"))


async def sandboxes(driven: Driven) -> None:
    first = (await driven.given("sandbox_info"))["sandbox"]
    forked = await driven.given("fork_sandbox")
    assert forked["in_use"] == first
    await driven("run_command", command="echo only here > /mnt/data/first.txt")
    await driven("use_sandbox", sandbox=forked["sandbox"])
    seen = words(await driven("list_files"))
    assert "pixel.png" in seen and "first.txt" not in seen
    await driven("end_sandbox", sandbox=first)


async def snapshots(driven: Driven) -> None:
    await driven("write_file", path="kept.txt", text="as it was")
    made = (await driven.given("snapshot_sandbox", name="a-moment"))["snapshot"]
    assert made["id"] in {each["id"] for each in (await driven.given("list_snapshots"))["snapshots"]}
    await driven("new_sandbox")
    assert "kept.txt" not in words(await driven("list_files"))
    await driven("new_sandbox", template="a-moment")
    assert words(await driven("read_file", path="kept.txt")) == "as it was"
    await driven("remove_snapshot", snapshot=made["id"])


async def test_pictures_tables_progress_and_cancellation(connecting: Connecting):
    async with connecting() as client:
        await pictures_and_tables_are_content(client)
        await what_a_program_says_is_told_as_progress(client)
        await a_cancelled_call_interrupts_its_program(client)


async def pictures_and_tables_are_content(client: Client) -> None:
    drawn = await client.call_tool(
        "run_code", {"code": "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()"}
    )
    table = await client.call_tool(
        "run_code", {"code": "import pandas; pandas.DataFrame({'n': [1, 2]}, index=['a', 'b|c'])"}
    )
    bold = await client.call_tool("run_code", {"code": "from IPython.display import HTML; HTML('<b>bold</b>')"})
    assert next(each.resource.text for each in bold.content if each.type == "resource") == "<b>bold</b>"
    picture = next(each for each in drawn.content if each.type == "image")
    assert base64.b64decode(picture.data).startswith(b"\x89PNG")
    assert words(table).splitlines() == ["|  | n |", "| --- | --- |", "| a | 1 |", "| b\\|c | 2 |"]
    assert table.structured_content["results"][0]["table"] == {"columns": ["n"], "rows": [[1], [2]]}


async def what_a_program_says_is_told_as_progress(client: Client) -> None:
    told: list[str] = []
    first = asyncio.Event()

    async def on_progress(count: float, total: float | None, message: str | None) -> None:
        told.append(message or "")
        first.set()

    code = "print('first', flush=True)\nimport os, time\nwhile not os.path.exists('go'): time.sleep(.01)\nprint('last')"
    running = asyncio.create_task(client.call_tool("run_code", {"code": code}, progress_callback=on_progress))
    await asyncio.wait_for(first.wait(), 60)
    assert not running.done()  # it was told while the program ran
    await client.call_tool("write_file", {"path": "go", "text": ""})
    assert words(await running) == "first\nlast\n"
    assert "".join(told) == "first\nlast\n"


async def a_cancelled_call_interrupts_its_program(client: Client) -> None:
    code = "open('on', 'w').close()\nimport time\ntry:\n    time.sleep(100)\nfinally:\n    open('off', 'w').close()"
    await client.call_tool("run_code", {"code": "kept = 1"})
    running = asyncio.create_task(client.call_tool("run_code", {"code": code}))
    await until_there(client, "on")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until_there(client, "off")
    assert words(await client.call_tool("run_code", {"code": "kept"})) == "1"


async def until_there(client: Client, name: str) -> None:
    async with asyncio.timeout(60):
        while name not in words(await client.call_tool("list_files", {})).replace("/mnt/data/", "").split():
            await asyncio.sleep(0.02)


async def test_failures_are_told_apart_and_output_is_bounded(connecting: Connecting):
    async with connecting() as client:
        await the_program_failed_is_data_and_we_failed_is_an_error(client)
        await output_without_end_is_bounded(client)
        await an_answer_over_a_stream_fits_into_one_event(client)
        await client.call_tool("new_sandbox", {})
        await hostile_output_is_still_valid_json(client)


async def the_program_failed_is_data_and_we_failed_is_an_error(client: Client) -> None:
    raised = await client.call_tool("run_code", {"code": "1/0"})
    assert not raised.is_error and raised.structured_content["error"]["name"] == "ZeroDivisionError"
    late = await client.call_tool("run_code", {"code": "while True: pass", "timeout_seconds": 0.5})
    assert not late.is_error and late.structured_content["outcome"] == "timed_out"
    for name, arguments, said in (
        ("run_code", {"cod": "1"}, "there is no argument 'cod'; there are: code, "),
        ("run_code", {}, "missing required field `code`"),
        ("run_code", {"code": 7}, "$.code"),
        ("run_code", {"code": "1", "language": "cobol"}, "language cannot be 'cobol'; it is one of: bash, "),
        ("run_code", {"code": "1", "context": "none"}, "context_not_found"),
        ("read_file", {"path": "/mnt/data/none"}, "file_not_found"),
        ("upload_file", {"path": "a", "base64": "%"}, "base64 is not valid Base64"),
        ("install_packages", {"packages": ["--index-url=http://evil"]}, "$.packages"),
        ("kill_process", {"process": "none"}, "process_not_found"),
        ("use_sandbox", {"sandbox": "i" + "0" * 20}, "sandbox_not_found"),
    ):
        failed = await client.call_tool(name, arguments)
        assert failed.is_error and said in words(failed), words(failed)
    with pytest.raises(MCPError, match="there is no tool 'nothing'; there are: "):
        await client.call_tool("nothing", {})


async def test_two_sessions_do_not_see_each_other(connecting: Connecting):
    async with connecting() as one, connecting() as other:
        await one.call_tool("run_code", {"code": "secret = 1; open('mine.txt', 'w').write('mine')"})
        seen = await other.call_tool("run_code", {"code": "import os; print(os.listdir()); secret"})
        assert "NameError" in words(seen) and "mine.txt" not in words(seen)
        assert not (await other.list_resources()).resources


async def test_a_session_whose_sandbox_is_gone_says_so_and_goes_on(house: House, connecting: Connecting):
    async with connecting() as client:
        info = (await client.call_tool("sandbox_info", {})).structured_content
        house.ask("DELETE", f"/api/v1/sandboxes/{info['sandbox']}")
        gone = await client.call_tool("run_code", {"code": "1"})
        assert gone.is_error and "sandbox_killed" in words(gone) and "begins in a new sandbox" in words(gone)
        assert words(await client.call_tool("run_code", {"code": "1+1"})) == "2"


async def output_without_end_is_bounded(client: Client) -> None:
    code = "for _ in range(200): print('x' * 100_000)\n'y' * 10_000_000"
    ran = await client.call_tool("run_code", {"code": code})
    listed = await client.call_tool("run_command", {"command": "head -c 20000000 /dev/zero | tr '\\0' z"})
    assert ran.structured_content["outcome"] == "ok"
    for result in (ran, listed):
        assert len(result.model_dump_json()) < 500_000
        assert "characters are left out here" in words(result)


async def an_answer_over_a_stream_fits_into_one_event(client: Client) -> None:
    """However large it is, and whatever it is made of: the official client takes a mebibyte."""
    code = r"""
import numpy, matplotlib.pyplot as plt
print(chr(1) * 100_000, flush=True)
for _ in range(30): display(chr(1) * 60_000)
for _ in range(3): plt.figure(figsize=(9, 9)); plt.imshow(numpy.random.rand(900, 900, 3)); plt.show()
raise ValueError(chr(0x10000) * 50_000)
"""

    async def on_progress(count: float, total: float | None, message: str | None) -> None:
        pass

    ran = await client.call_tool("run_code", {"code": code}, progress_callback=on_progress)
    assert ran.structured_content["error"]["name"] == "ValueError"
    assert any("left out here" in each.text for each in ran.content if each.type == "text")


async def hostile_output_is_still_valid_json(client: Client) -> None:
    code = r"""
import os, sys
os.write(1, bytes(range(256)) + b'\xed\xa0\x80')
print('\x00\x1b]0;title\x07\u2028\u0085\ud800')
open(b'/mnt/data/\xff\xfe\n.txt', 'w').close()
open('/mnt/data/odd\n\x1b[31m\u2028 %2f?#.txt', 'w').close()
class Odd:
    def __repr__(self): return '\ud800' + '\u2029' * 3
    def _repr_html_(self): return '<table><tr><td rowspan=99999999 colspan=9999>\ud800<td>'
raise_later = type('\udcff', (Exception,), {})
display(Odd())
raise raise_later('\udcff')
"""
    ran = await client.call_tool("run_code", {"code": code})
    assert not ran.is_error and ran.structured_content["outcome"] == "raised"
    listed = await client.call_tool("list_files", {})
    assert len(listed.structured_content["files"]) == 2
    resources = (await client.list_resources()).resources
    odd = next(each for each in resources if "odd" in each.name)
    assert (await client.read_resource(str(odd.uri))).contents[0].text == ""
    wrong = await client.call_tool("read_file", {"path": "\x00\x1b"})
    assert wrong.is_error
