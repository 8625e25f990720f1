"""However much a program opens, sends or waits: it is bounded, written down, and nobody else's loss."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Callable

import pytest
import uvloop
from tests.network.conftest import GOOD, Opening, answering, echo, read_all, serving_at

from cloche.egress import journal
from cloche.egress.connect import LOOKUPS_PER_OWNER, NameUnresolved
from cloche.egress.journal import FIRST_LINES, LINES_AT_ONCE, MAX_LOG_TARGETS
from cloche.network_policy import NetworkPolicy
from cloche.telemetry import log

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the")

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@pytest.fixture(params=[pytest.param("asyncio", marks=pytest.mark.long), "uvloop"])
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
    one = opening(allow=("good.test:*",), settings={"connections": 3, "connections_total": 6})
    two = opening(allow=("good.test:*",), beside=one, owner="somebody else")
    three = opening(allow=("good.test:*",), beside=one, owner="a third")
    async with serving_at(echo) as server:
        there = f"good.test:{server.port}"
        held = [await each.connect(there) for each in (one, two) for _ in range(3)]
        answer = await three.say(f"CONNECT {there} HTTP/1.1\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 503 ") and b"of all sandboxes at once" in answer
        for _, writer in held:
            writer.close()
        await one.lines(3)
        await two.lines(3)


async def test_the_sandboxes_of_one_owner_leave_room_for_others(opening: Opening) -> None:
    one = opening(allow=("good.test:*",), settings={"connections": 3, "connections_total": 8})
    two = opening(allow=("good.test:*",), beside=one)
    others = opening(allow=("good.test:*",), beside=one, owner="somebody else")
    async with serving_at(echo) as server:
        there = f"good.test:{server.port}"
        held = [await one.connect(there) for _ in range(3)] + [await two.connect(there)]
        answer = await two.say(f"CONNECT {there} HTTP/1.1\r\n\r\n".encode())
        assert (
            answer.startswith(b"HTTP/1.1 503 ") and b"more than 4 connections of all sandboxes of one owner" in answer
        )
        held.append(await others.connect(there))
        for _, writer in held:
            writer.close()
        await others.lines(1)
        await two.lines(2)
        assert await leaves(lambda: not one.egress.connections)
        held = [await two.connect(there) for _ in range(3)]
        for _, writer in held:
            writer.close()


async def leaves(is_so: Callable[[], bool]) -> bool:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.002)
    return True


async def test_lookups_that_never_end_are_one_owners_loss(opening: Opening) -> None:
    never = asyncio.Event()
    asked = []

    async def resolve(name: str):
        asked.append(name)
        if name == "hangs.test":
            await never.wait()
        return [ipaddress.ip_address(GOOD)]

    settings = {"connect_seconds": 0.8, "lookups": LOOKUPS_PER_OWNER}
    one = opening(allow=("*:*",), resolve=resolve, settings=settings)
    two = opening(allow=("*:*",), beside=one)
    others = opening(allow=("*:*",), beside=one, owner="somebody else")
    hanging = [one.say(b"CONNECT hangs.test:80 HTTP/1.1\r\n\r\n") for _ in range(LOOKUPS_PER_OWNER)]
    assert all(answer.startswith(b"HTTP/1.1 504 ") for answer in await asyncio.gather(*hanging))
    async with serving_at(answering(OK)) as server:
        there = f"good.test:{server.port}"
        fetch = f"GET http://{there}/ HTTP/1.1\r\nHost: {there}\r\n\r\n".encode()
        assert (await others.say(fetch)).endswith(b"hello")
        answer = await two.say(fetch)
        assert answer.startswith(b"HTTP/1.1 504 Too many lookups") and b"for its owner" in answer
        assert len(asked) == LOOKUPS_PER_OWNER + 1
        never.set()
        await asyncio.sleep(0)
        assert (await two.say(fetch)).endswith(b"hello")


async def test_a_listener_that_was_made_to_wait_does_not_stop_the_loop(opening: Opening) -> None:
    """Whoever has a copy of it could: it has the flags of all copies."""
    door = opening(allow=("good.test:*",))
    copy = socket.socket(fileno=os.dup(door.door._arrivals._listener.fileno()))
    os.set_blocking(copy.fileno(), True)

    def outside() -> bool:
        """In a thread of its own, which frees the loop where it hangs."""
        with socket.create_connection(("127.0.0.1", door.port), timeout=10) as client:
            try:
                client.sendall(b"GET http://other.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n")
                return client.recv(100).startswith(b"HTTP/1.1 403 ")
            except TimeoutError:
                os.set_blocking(copy.fileno(), False)
                socket.create_connection(("127.0.0.1", door.port)).close()
                return False

    door.visits += 1
    with copy:
        assert await asyncio.to_thread(outside)


@pytest.mark.parametrize(
    "said", [b"", b"GET http://good.test/ HTTP/1.1\r\nHost", b"\5", b"\5\1\0\5\1\0\3\xff", b"CONN"]
)
async def test_a_silent_connection_times_out(opening: Opening, said: bytes) -> None:
    door = opening(allow=("good.test",), settings={"request_seconds": 0.2})
    answer = await door.say(said)
    assert said[:1] == b"\5" or answer.startswith(b"HTTP/1.1 408 ")
    line = await door.line()
    assert (line.verdict, line.reason) == ("failed", "it did not send a whole request within 0.2 s")


@pytest.mark.parametrize("said", [b"\x16\x03\x01\x02\x00\x01", b"GET / HT"])
async def test_nor_inside_of_a_tunnel(opening: Opening, said: bytes) -> None:
    door = opening(allow=("good.test:*",), settings={"request_seconds": 0.5})
    async with serving_at(silent) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        writer.write(said)
        await read_all(reader)
        writer.close()
        assert (await door.line()).reason == "it did not send a whole request within 0.5 s"
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
async def test_a_cut_connection_does_not_look_complete(opening: Opening, why: str) -> None:
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
async def test_a_slow_reader_slows_the_sender(opening: Opening, way: str) -> None:
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
            await asyncio.sleep(0.3)  # a stream that is not held would have moved more
        assert 0 < door.door.moved_bytes < 64 << 20
        stop.set()
        if sending is not None:
            sending.cancel()
        writer.transport.abort()
    assert (await door.line()).verdict == "allowed"


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("nowhere.test:80", b"502 Host not found: nowhere.test"),
        ("good.test:1", b"502 Host refuses connections: good.test"),
        ("slow.test:80", b"504 Host does not answer: slow.test"),
        ("evil.test:80", b"403 Denied by network policy: evil.test"),
        ("127.0.0.1:80", b"403 Denied by network policy: 127.0.0.1"),
        ("evil\\name:80", b"400 Bad Request"),
    ],
)
async def test_the_line_that_clients_show_says_why_and_which_host(opening: Opening, host: str, said: bytes) -> None:
    async def resolve(name: str):
        if name == "nowhere.test":
            raise NameUnresolved("nowhere.test is not known")
        if name == "slow.test":
            await asyncio.sleep(60)
        return [ipaddress.ip_address(GOOD)]

    allow = ("nowhere.test", "good.test:*", "slow.test", "127.0.0.1")
    door = opening(allow=allow, resolve=resolve, settings={"connect_seconds": 0.2})
    answer = await door.say(f"CONNECT {host} HTTP/1.1\r\n\r\n".encode())
    assert answer.split(b"\r\n")[0] == b"HTTP/1.1 " + said


async def test_the_log_keeps_the_last_and_counts_all(opening: Opening) -> None:
    door = opening(allow=("good.test",), settings={"log_entries": 10})
    for number in range(30):
        await door.say(f"CONNECT host{number}.test:80 HTTP/1.1\r\n\r\n".encode())
    journal = door.door.journal
    assert [each.host for each in journal.entries] == [f"host{number}.test" for number in range(20, 30)]
    assert (journal.count, journal.dropped) == (30, 20)


def said_of_networks() -> list[tuple[str, str, dict]]:
    return [(each.event, each.fields.get("host", ""), each.fields) for each in log.kept if "network." in each.event]


@pytest.fixture
def clean_log() -> None:
    log.recent.clear()
    log._of_networks.clear()


async def test_a_flood_of_denials_does_not_flood_the_servers_log(opening: Opening, clean_log: None) -> None:
    door = opening(allow=("good.test",))
    count = LINES_AT_ONCE * 3
    for _ in range(count):
        await door.say(b"CONNECT evil.test:80 HTTP/1.1\r\n\r\n")
    door.door.close()
    sums = [fields for event, _, fields in said_of_networks() if event == "network.left_out"]
    lines = [event for event, _, _ in said_of_networks() if event == "network.denied"]
    assert {(each["verdict"], each["host"], each["port"]) for each in sums} == {("denied", "evil.test", 80)}
    assert len(lines) + sum(each["lines"] for each in sums) == door.door.journal.count == count
    assert len(sums) < 5 and sum(each["lines"] for each in sums) >= LINES_AT_ONCE


async def test_unknown_hosts_do_not_grow_the_log_either(opening: Opening, clean_log: None) -> None:
    door = opening(allow=("good.test",))
    count = 700
    for number in range(count):
        await door.say(f"CONNECT host{number}.test:80 HTTP/1.1\r\n\r\n".encode())
    door.door.close()
    said = said_of_networks()
    lines = sum(fields.get("lines", 1) for _, _, fields in said)
    assert lines == count and len(said) < FIRST_LINES["denied"] + MAX_LOG_TARGETS + LINES_AT_ONCE + 100
    assert [host for _, host, _ in said].count("others") == 1


async def test_no_host_that_was_reached_hides_among_many(opening: Opening, clean_log: None) -> None:
    """What is said of others, and however often, does not take its line."""
    door = opening(allow=("good.test:*", "api.good.test:*"))
    async with serving_at(answering(OK)) as server:

        async def get(host: str) -> bytes:
            there = f"{host}:{server.port}"
            return await door.say(f"GET http://{there}/ HTTP/1.1\r\nHost: {there}\r\n\r\n".encode())

        for number in range(150):
            await get("good.test")
            await door.say(f"CONNECT host{number}.test:80 HTTP/1.1\r\n\r\n".encode())
        assert b"200 OK" in await get("api.good.test")
        (found,) = [fields for event, host, fields in said_of_networks() if host == "api.good.test"]
        assert (found["sandbox"], found["owner"]) == ("sbx", "somebody")
        for _ in range(20):
            await get("api.good.test")
    door.door.close()
    rest = [fields for event, host, fields in said_of_networks() if host == "api.good.test"]
    assert sum(each["received_bytes"] for each in rest) == 21 * found["received_bytes"]


async def test_omitted_log_lines_are_counted_before_the_sandbox_ends(
    opening: Opening, clean_log: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SUMMING_SECONDS", 0.05)
    door = opening(allow=("good.test",))
    for _ in range(LINES_AT_ONCE + 20):
        await door.say(b"CONNECT evil.test:80 HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(20):
        while not any(event == "network.left_out" for event, _, _ in said_of_networks()):
            await asyncio.sleep(0.02)


async def test_the_log_has_open_connections_after_ended_ones(opening: Opening) -> None:
    door = opening(allow=("good.test:*",))
    async with serving_at(echo) as server:
        there = f"good.test:{server.port}"
        reader, writer = await door.connect(there)
        writer.write(b"\0data")
        await reader.readexactly(5)
        await door.say(b"CONNECT evil.test:80 HTTP/1.1\r\n\r\n")
        ended, going_on = door.door.log
        assert (ended.verdict, going_on.verdict) == ("denied", "open") and going_on.at < ended.at
        assert (going_on.host, going_on.port, going_on.sent_bytes) == ("good.test", server.port, 5)
        assert going_on.received_bytes == 5 and "sent 5, received 5" in str(going_on)
        writer.close()
        await door.lines(2)
    assert [each.verdict for each in door.door.log] == ["allowed", "denied"]  # in the order in which they began


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


async def test_a_connection_during_closing_is_logged(opening: Opening) -> None:
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


async def test_no_flood_of_denials_hides_a_fault_of_ours(opening: Opening, clean_log: None) -> None:
    async def resolve(name: str):
        raise RuntimeError("a bug")

    door = opening(allow=("good.test",), resolve=resolve)
    for _ in range(LINES_AT_ONCE + 20):
        await door.say(b"CONNECT evil.test:80 HTTP/1.1\r\n\r\n")
    await door.say(b"CONNECT good.test:80 HTTP/1.1\r\n\r\n")
    assert [each.event for each in log.recent].count("network.broken") == 1


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
