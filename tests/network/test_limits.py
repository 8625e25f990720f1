"""However much a program opens, sends or waits: it is bounded, written down, and nobody else's loss."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections import Counter

import pytest
import uvloop
from tests.network.conftest import GOOD, Opening, answering, echo, read_all, serving_at

from cloche.egress.journal import LINES_AT_ONCE
from cloche.network_policy import NetworkPolicy
from cloche.telemetry import log

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the")

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"\0" * 65536)
        await writer.drain()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(65536):
        pass


async def test_one_connection_too_many_is_told_so(opening: Opening) -> None:
    door = opening(allow=("good.test:*",), settings={"connections": 3})
    async with serving_at(echo) as server:
        there = f"good.test:{server.port}"
        held = [await door.connect(there) for _ in range(3)]
        answer = await door.say(f"CONNECT {there} HTTP/1.1\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 503 ") and b"more than 3 connections" in answer
        assert (await door.line()).verdict == "denied"
        for _, writer in held:
            writer.close()
        await door.lines(4)
        async with asyncio.timeout(10):
            while door.door.connections:
                await asyncio.sleep(0.002)
        _, writer = await door.connect(there)
        writer.close()
    assert Counter(each.verdict for each in await door.lines(5)) == {"allowed": 4, "denied": 1}


async def test_all_sandboxes_together_have_a_limit_too(opening: Opening) -> None:
    one = opening(allow=("good.test:*",), settings={"connections": 3, "connections_total": 4})
    two = opening(allow=("good.test:*",), beside=one)
    async with serving_at(echo) as server:
        there = f"good.test:{server.port}"
        held = [await one.connect(there) for _ in range(3)] + [await two.connect(there)]
        answer = await two.say(f"CONNECT {there} HTTP/1.1\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 503 ") and b"of all sandboxes" in answer
        for _, writer in held:
            writer.close()
        await one.lines(3)
        await two.lines(2)


@pytest.mark.parametrize(
    "said", [b"", b"GET http://good.test/ HTTP/1.1\r\nHost", b"\5", b"\5\1\0\5\1\0\3\xff", b"CONN"]
)
async def test_who_does_not_say_what_they_want_is_not_waited_for(opening: Opening, said: bytes) -> None:
    door = opening(allow=("good.test",), settings={"request_seconds": 0.2})
    answer = await door.say(said)
    assert said[:1] == b"\5" or answer.startswith(b"HTTP/1.1 408 ")
    line = await door.line()
    assert (line.verdict, line.reason) == ("failed", "it did not say within 0.2 s what it wants")


@pytest.mark.parametrize("said", [b"\x16\x03\x01\x02\x00\x01", b"GET / HT"])
async def test_nor_inside_of_a_tunnel(opening: Opening, said: bytes) -> None:
    door = opening(allow=("good.test:*",), settings={"request_seconds": 0.5})
    async with serving_at(silent) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        writer.write(said)
        await read_all(reader)
        writer.close()
        assert (await door.line()).reason == "it did not say within 0.5 s what it wants"
        assert server.heard == b""


async def test_a_connection_on_which_nothing_moves_is_ended(opening: Opening) -> None:
    door = opening(allow=("good.test:*",), settings={"idle_seconds": 0.2})
    async with serving_at(silent) as server:
        there = f"good.test:{server.port}"
        reader, writer = await door.connect(there)
        writer.write(b"\0")
        assert await read_all(reader) == b""
        writer.close()
        answer = await door.say(f"GET http://{there}/ HTTP/1.1\r\nHost: {there}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 504 ")
    one, two = await door.lines(2)
    assert (one.verdict, one.reason) == ("allowed", "nothing moved for 0.2 s")
    assert (two.verdict, two.reason) == ("failed", "nothing moved for 0.2 s")


async def test_a_connection_on_which_only_one_side_speaks_is_not_idle(opening: Opening) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(45):
            writer.write(b".")
            await asyncio.sleep(0.05)

    door = opening(allow=("good.test:*",), settings={"idle_seconds": 2.0})
    async with serving_at(drip) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        assert await read_all(reader) == b"." * 45
        writer.close()
    assert (await door.line()).reason == ""


async def test_an_endless_stream_ends(opening: Opening) -> None:
    door = opening(allow=("good.test:*",), settings={"connection_seconds": 0.5})
    async with serving_at(endless) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        await read_all(reader)
        writer.close()
    line = await door.line()
    assert (line.verdict, line.reason) == ("allowed", "it took longer than 0.5 s")
    assert line.received_bytes > 0


@pytest.mark.parametrize("why", ["time", "policy", "end"])
async def test_what_is_cut_off_does_not_look_like_the_end(opening: Opening, why: str) -> None:
    """A body can end with its connection."""

    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await reader.read(1)

    door = opening(allow=("good.test:*",), settings={"connection_seconds": 1.0 if why == "time" else 60.0})
    async with serving_at(page) as server:
        there = f"good.test:{server.port}"
        reader, writer = await door.open()
        writer.write(f"GET http://{there}/ HTTP/1.1\r\nHost: {there}\r\n\r\n".encode())
        await reader.readuntil(b"hel")
        if why == "policy":
            door.door.replace(NetworkPolicy())
        elif why == "end":
            door.door.close()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.close()
    assert (await door.line()).verdict == ("denied" if why == "policy" else "allowed")


@pytest.mark.parametrize("way", ["down", "up", "http"])
async def test_a_sandbox_moves_so_many_bytes_and_no_more(opening: Opening, way: str) -> None:
    limit = 3_000_000
    door = opening(allow=("good.test:*",), settings={"sandbox_bytes": limit})

    async def endless_page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await endless(reader, writer)

    async with serving_at({"up": silent, "down": endless, "http": endless_page}[way]) as server:
        there = f"good.test:{server.port}"
        if way == "http":
            await door.say(f"GET http://{there}/ HTTP/1.1\r\nHost: {there}\r\n\r\n".encode())
        else:
            await _move(*await door.connect(there), sends=way == "up")
        line = await door.line()
        assert (line.verdict, line.reason) == ("denied", f"the sandbox has moved more than {limit} bytes")
        assert limit <= line.sent_bytes + line.received_bytes <= limit + 65536
        assert len(server.heard) <= limit
        assert (await door.say(f"CONNECT {there} HTTP/1.1\r\n\r\n".encode())).startswith(b"HTTP/1.1 429 ")


async def _move(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, sends: bool) -> None:
    reading = asyncio.create_task(read_all(reader))
    try:
        if sends:
            await endless(reader, writer)
    except ConnectionError:
        pass
    await reading
    writer.close()


@pytest.mark.parametrize("way", ["down", "up"])
async def test_who_does_not_read_makes_the_other_wait(opening: Opening, way: str) -> None:
    """What is sent and not taken stays with who sends it: here are buffers of some kilobytes, and in the kernel."""
    door = opening(allow=("good.test:*",))
    stop = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stop.wait()

    async with serving_at(endless if way == "down" else deaf) as server:
        _, writer = await door.connect(f"good.test:{server.port}")
        sending = None
        if way == "up":
            sending = asyncio.create_task(endless(None, writer))  # type: ignore[arg-type]
        before = -1
        while before != door.door.moved_bytes:
            before = door.door.moved_bytes
            await asyncio.sleep(0.3)
        assert 0 < door.door.moved_bytes < 64 << 20
        stop.set()
        if sending is not None:
            sending.cancel()
        writer.transport.abort()
    assert (await door.line()).verdict == "allowed"


async def test_the_log_keeps_the_last_and_counts_all(opening: Opening) -> None:
    door = opening(allow=("good.test",), settings={"log_entries": 10})
    for number in range(30):
        await door.say(f"CONNECT host{number}.test:80 HTTP/1.1\r\n\r\n".encode())
    journal = door.door.journal
    assert [each.host for each in journal.entries] == [f"host{number}.test" for number in range(20, 30)]
    assert (journal.count, journal.dropped) == (30, 20)


async def test_a_flood_of_denials_does_not_flood_the_servers_log(opening: Opening) -> None:
    door = opening(allow=("good.test",))
    log.recent.clear()
    count = LINES_AT_ONCE * 3
    for _ in range(count):
        await door.say(b"CONNECT evil.test:80 HTTP/1.1\r\n\r\n")
    door.door.close()
    said = [each for each in log.recent if each.event == "network.left_out"]
    left_out = sum(each.fields["lines"] for each in said)
    assert left_out >= LINES_AT_ONCE
    assert door.door.journal.count == count


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_when_the_sandbox_ends_nothing_is_left_but_lines(opening: Opening) -> None:
    """In the middle of everything that a connection can be in the middle of."""
    asked = asyncio.Event()

    async def resolve(name: str):
        if name == "hangs.test":
            asked.set()
            await asyncio.Event().wait()
        return [ipaddress.ip_address(GOOD)]

    async with serving_at(endless) as stream, serving_at(silent) as mute:
        tasks, files = len(asyncio.all_tasks()), descriptors()
        door = opening(allow=("*:*",), resolve=resolve)
        clients = [await door.open()]
        for said in (b"GET http", b"\5\1", b"CONNECT hangs.test:80 HTTP/1.1\r\n\r\n"):
            clients.append(await door.open())
            clients[-1][1].write(said)
        there = f"good.test:{mute.port}"
        clients.append(await door.connect(f"good.test:{stream.port}"))
        clients.append(await door.connect(there))
        clients[-1][1].write(b"\x16\x03\x01\x02\x00")
        clients.append(await door.open())
        clients[-1][1].write(f"POST http://{there}/ HTTP/1.1\r\nHost: {there}\r\nContent-Length: 9\r\n\r\nx".encode())
        async with asyncio.timeout(10):
            await asked.wait()
            while not mute.heard:
                await asyncio.sleep(0.01)
        await door.door.aclose()
        late = await asyncio.gather(*(read_all(reader) for reader, _ in clients))
        assert len(late) == len(clients)
        for _, writer in clients:
            writer.close()
        entries = door.door.journal.entries
        assert len(entries) == len(clients)
        assert {each.reason for each in entries} == {"the sandbox ended"}
        await door.egress.aclose()
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > tasks or descriptors() > files:
                await asyncio.sleep(0.01)


async def test_who_connects_as_the_door_closes_is_written_down(opening: Opening) -> None:
    door = opening(allow=("*:*",))
    reader, writer = await door.open()
    while not door.door._visits:  # accepted, and not yet begun to be served
        door.door._accept()
    door.door.close()
    assert (await door.line()).reason == "the sandbox ended"
    assert await read_all(reader) == b""
    writer.close()


async def test_a_fault_of_ours_ends_one_connection_with_a_line(opening: Opening) -> None:
    async def resolve(name: str):
        raise RuntimeError("a bug")

    door = opening(allow=("*:*",), resolve=resolve)
    assert await door.say(b"CONNECT good.test:80 HTTP/1.1\r\n\r\n") == b""
    line = await door.line()
    assert (line.verdict, line.reason) == ("failed", "the proxy itself has failed")
    assert any(each.event == "network.broken" and each.fields["error"] == "RuntimeError" for each in log.recent)


async def test_thousands_of_connections_one_after_another_leave_nothing(opening: Opening) -> None:
    door = opening(allow=("good.test:*",))
    async with serving_at(answering(OK)) as server:
        there = f"good.test:{server.port}"
        said = f"GET http://{there}/ HTTP/1.1\r\nHost: {there}\r\n\r\n".encode()
        await door.say(said)
        files = descriptors()
        for _ in range(20):
            await asyncio.gather(*(door.say(said) for _ in range(25)))
        await door.lines(501)
        async with asyncio.timeout(10):
            while descriptors() > files:
                await asyncio.sleep(0.01)
    assert {each.verdict for each in door.door.journal.entries} == {"allowed"}
