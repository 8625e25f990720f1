"""What programs may try at the door where they call tools."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from tests.engine.tool_programs import ECHO, Client, script

from cloche.engine.executions import tools
from cloche.engine.executions.tools import ToolOffer
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import ToolResult

pytestmark = pytest.mark.asyncio(loop_scope="session")


FORGED = r"""
import json, socket, sys
port, token = json.loads(sys.argv[1])
def say(*parts, end=False):
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.settimeout(20)
        try:
            for part in parts: line.sendall(part)
            if end: line.shutdown(socket.SHUT_WR)
            got = b""
            while more := line.recv(65536): got += more
        except OSError as error:
            return type(error).__name__
        return got.decode()
print(say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"y" * 200))
print(say(b"wrong\0" + b"0\0echo_it\0{}\0"))
for count in (b"-1", b"x", b"00", b"99999", b""):
    print(say(token.encode() + b"\0" + count + b"\0"))
print(say(token.encode() + b"\0" + b"0\0no_such\0{}\0"))
print(say(token.encode() + b"\0" + b"0\0echo_it\0" + b"[" * 100_000 + b"\0"))
print(say(token.encode() + b"\0" + b"0\0echo_it\0{\"a\":[" + b"0," * 300_000 + b"0]}\0"))
print(say(token.encode() + b"\0" + b"0\0echo_it\0\xff\xfe\0"))
print(repr(say(token.encode() + b"\0" + b"0\0echo", end=True)))
idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
print("done")
"""


async def test_forged_calls_are_answered_and_harmless(box: Sandbox):
    async with box.tools.make_offer([ECHO]) as offer, box.tools.make_offer([ECHO]) as other:
        words = json.dumps([offer.header["port"], offer.header["token"]])
        forging = await box.commands.run(["python3", "-c", FORGED, words])
        lines = [line for line in forging.stdout.splitlines() if line]
        assert lines[-1] == "done", forging.stderr
        said = [line for line in lines if not line.startswith(("-1 error", "0 error"))]
        assert "invalid tool call" in said[0] and "no tools are offered to this program" in said[1]
        assert all("does not say how many" in line for line in said[2:7])
        assert "there is no tool 'no_such'" in said[7]
        assert "is no JSON" in said[8] and "a call can have 200000 values" in said[9] and "is no JSON" in said[10]
        assert offer.calls == other.calls == ()
        # And whoever is honest is served as before.
        assert (await script(box, "print(await echo_it(n=1))", Client(), [ECHO])).stdout == "{'n': 1}\n"


async def test_a_token_is_good_for_as_long_as_its_offer_is(box: Sandbox):
    async with box.tools.make_offer([ECHO], language="bash") as offer:
        env = offer.env
    over = await box.commands.run("echo_it '{}'", env=env)
    assert (over.stdout, over.exit_code) == ("", 1) and "no tools are offered to this program" in over.stderr


async def test_a_program_says_so_much_and_no_more(box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tools, "MAX_PROGRAM_BYTES", 1 << 20)
    source = """
await echo_it(text="x" * 700_000)
try:
    await echo_it(text="x" * 700_000)
except ToolExecutionError as error:
    print(error)
"""
    result = await script(box, source, Client(lambda _: None), [ECHO])
    assert "a program can say 1048576 bytes to its tools" in result.stdout, result.stderr


# --- what would cost the server more than the program


def connection(offer: ToolOffer, then: str) -> list[str]:
    """A program that has `say(content)`, which gives the connection."""
    port, token = offer.header["port"], offer.header["token"]
    source = f"""
import socket, time
def say(content):
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    line.connect(("127.0.0.1", {port}))
    line.settimeout(30)
    line.sendall({token.encode()!r} + b"\\0" + content)
    return line
def heard(line):
    got = b""
    while more := line.recv(65536): got += more
    return got
{then}
"""
    return ["python3", "-c", source]


async def test_text_without_an_end_is_text(box: Sandbox):
    """To look for its end behind each of its quotes would take days."""
    program = """
signs = b"," * 200_001
print(heard(say(b'0\\0echo_it\\0{"a":"' + signs + b'\\\\"' * 2_000_000 + b'\\0')))
print(heard(say(b'0\\0echo_it\\0{"a":"' + signs + b'\\\\' + b'\\0')))
print(heard(say(b'0\\0echo_it\\0{"a":"x",' + signs + b'"' + b'\\0')))
"""
    async with box.tools.make_offer([ECHO]) as offer:
        result = await box.commands.run(connection(offer, program))
    unended, escape, outside = result.stdout.splitlines()
    assert "is no JSON" in unended and "is no JSON" in escape and "a call can have 200000 values" in outside


async def test_calls_that_are_refused_count_and_end_in_one_answer(box: Sandbox):
    program = """
print(heard(say(b"9999\\0" + b"x\\0\\0" * 9999)))
print(heard(say(b"150\\0" + b"x\\0\\0" * 150)).count(b"there is no tool"))
some = heard(say(b"100\\0" + b"x\\0\\0" * 100))
print(some.count(b"there is no tool"), some.count(b"200 times, and this one has"))
print([heard(say(b"1000\\0" + b"x\\0\\0" * 1000)).count(b"\\n") for _ in range(3)])
print(heard(say(b"0\\0echo_it\\0{}\\0")))
"""
    async with box.tools.make_offer([ECHO]) as offer:
        result = await box.commands.run(connection(offer, program))
        at_once, first, mixed, counts, last = result.stdout.splitlines()
        assert "-1 error" in at_once and "9999 calls at once are too many: 1000 are possible" in at_once
        assert (first, mixed, counts) == ("150", "50 50", "[2, 2, 2]"), result.stderr
        assert "200 times, and this one has" in last and offer.calls == ()


async def test_calls_that_are_announced_count_before_they_are_made(box: Sandbox):
    program = """
waiting = [say(b"200\\0") for _ in range(5)]
print([heard(each).count(b"200 times, and this one has") for each in waiting[1:]])
"""
    async with box.tools.make_offer([ECHO]) as offer:
        assert (await box.commands.run(connection(offer, program))).stdout == "[1, 1, 1, 1]\n"


async def test_unread_results_are_counted_and_limited(box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tools, "MAX_UNREAD_BYTES", 12_000_000)
    program = """
line = say(b"6\\0" + b"echo_it\\0{}\\0" * 6)
input()
print(*[head.split()[1].decode() for head in heard(line).split(b"\\n")[:12:2]])
"""
    async with box.tools.make_offer([ECHO]) as offer:
        process = await box.commands.start(connection(offer, program), stdin=True)
        async with process:
            calls = await offer.next_round()
            offer.answer([ToolResult(call_id=call.id, result="x" * 5_000_000) for call in calls])
            assert 1_000_000 < offer.held_bytes <= 12_000_000
            await process.send_stdin(b"\n")
            result = await process.result()
            said = result.stdout.split()  # how much the kernel takes is its own matter
            assert said[:2] == ["ok", "ok"] and said[-2:] == ["error", "error"], result
    assert offer.held_bytes == 0


async def test_undelivered_calls_are_counted_by_their_text(box: Sandbox):
    program = """
first = say(b"1\\0echo_it\\0{}\\0")
input()
second = say(b'2\\0echo_it\\0{"a":[' + b"[]," * 100_000 + b"[]]}\\0echo_it\\0")
input()
"""
    size = len(b'{"a":[') + 3 * 100_000 + len(b"[]]}")
    async with box.tools.make_offer([ECHO], raw=True) as offer:
        process = await box.commands.start(connection(offer, program), stdin=True)
        async with process:
            await offer.next_round()
            await process.send_stdin(b"\n")
            while offer.held_bytes < size:
                await asyncio.sleep(0.001)
            assert offer.held_bytes <= size + 100
    assert offer.held_bytes == 0


async def test_a_program_is_read_while_its_calls_fit_the_limit(box: Sandbox):
    program = """
lines = [say(b'1\\0echo_it\\0{"a":"' + b"x" * 1_500_000) for _ in range(3)]
import select
print([heard(line) for line in select.select(lines, [], [])[0]])
"""
    held: list[int] = []

    def no_room() -> str | None:
        held.append(offer.held_bytes)
        return "there is no room" if held[-1] > 3_000_000 else None

    async with box.tools.make_offer([ECHO], no_room=no_room) as offer:
        result = await box.commands.run(connection(offer, program))
        assert "there is no room" in result.stdout
        assert max(held) < 5_000_000


async def test_a_forwarding_client_gets_call_values_as_text(box: Sandbox):
    program = """
say(b'1\\0echo_it\\0 {"a": [1, {"b": "x"}], "n": 123456789012345678901234567890} \\0')
print([heard(say(b"0\\0echo_it\\0" + bad + b"\\0"))[10:60] for bad in (b"[1]", b'{"a": "\\xff"}', b'{"a": [1,]}')])
"""
    async with box.tools.make_offer([ECHO], raw=True) as offer:
        process = await box.commands.start(connection(offer, program))
        async with process:
            (call,) = await offer.next_round()
            given = msgspec.json.encode(call.input)
            assert given == b'{"a":[1, {"b": "x"}],"n":123456789012345678901234567890}'
            assert all(type(value) is msgspec.Raw for value in call.input.values())
            assert (await process.result()).stdout.count("takes one JSON object") == 3
