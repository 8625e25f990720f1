"""What goes through a door: CONNECT, plain HTTP and SOCKS5 to real servers, on both event loops."""

from __future__ import annotations

import asyncio
import ssl
import struct

import pytest
import uvloop
from tests.network.conftest import GOOD, OTHER, Doorway, Opening, answering, echo, read_all, serving_at

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the")  # there is no other way in older releases

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


def get(url: str, host: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {url} HTTP/{version}", f"Host: {host}", *headers, "", ""]).encode()


def socks(host: str, port: int, command: int = 1) -> bytes:
    """The greeting, and a request."""
    return b"\5\1\0\5" + bytes([command]) + b"\0\3" + bytes([len(host)]) + host.encode() + struct.pack("!H", port)


async def test_an_allowed_request_arrives_as_it_was_understood(opening: Opening) -> None:
    door = opening(allow=("good.test:*",))
    async with serving_at(answering(OK)) as server:
        host = f"good.test:{server.port}"
        asked = get(f"http://{host}/a?b=c", host, "X-Mine: 1", "Proxy-Connection: keep-alive", "Connection: keep-alive")
        answer = await door.say(asked)
    assert answer == b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
    assert server.heard == f"GET /a?b=c HTTP/1.1\r\nHost: {host}\r\nx-mine: 1\r\nConnection: close\r\n\r\n".encode()
    line = await door.line()
    assert (line.protocol, line.host, line.port, line.verdict, line.reason) == (
        "http",
        "good.test",
        server.port,
        "allowed",
        "",
    )
    assert (line.sent_bytes, line.received_bytes) == (len(server.heard), len(answer))


async def test_a_denied_host_is_not_even_looked_up(opening: Opening) -> None:
    asked = []

    async def resolve(name: str):
        asked.append(name)
        return []

    door = opening(allow=("good.test",), resolve=resolve)
    answer = await door.say(get("http://secret-data.evil.test/", "secret-data.evil.test"))
    assert answer.startswith(b"HTTP/1.1 403 Denied by network policy: secret-data.evil.test\r\n")
    assert b"secret-data.evil.test:80 is not allowed by the sandbox's network policy" in answer
    line = await door.line()
    assert (line.host, line.port, line.verdict) == ("secret-data.evil.test", 80, "denied")
    assert asked == []


@pytest.mark.parametrize(
    ("rules", "host", "verdict"),
    [
        ({"allow": ("*.good.test:*",)}, "api.good.test", "allowed"),
        ({"allow": ("*.good.test:*",)}, "a.b.good.test", "allowed"),
        ({"allow": ("*.good.test:*",)}, "API.Good.Test.", "allowed"),
        ({"allow": ("*.good.test:*",)}, "good.test", "denied"),
        ({"allow": ("*.good.test:*",)}, "notgood.test", "denied"),
        ({"allow": ("good.test",)}, "good.test", "denied"),  # on this port
        ({"allow": ("*:*",), "deny": ("api.good.test",)}, "api.good.test", "denied"),
        ({"allow": ("*:*",), "deny": ("api.good.test",)}, "good.test", "allowed"),
        ({"allow": ("*:*",), "deny": ("127.0.0.0/8",)}, "good.test", "denied"),  # where it leads
        ({"allow": ("*:*",)}, "its address", "allowed"),
        ({"allow": ("good.test:*",)}, "its address", "denied"),
    ],
)
async def test_rules_decide_in_each_protocol(opening: Opening, rules: dict, host: str, verdict: str) -> None:
    door = opening(**rules)
    host = GOOD if host == "its address" else host  # another one in each process
    async with serving_at(answering(OK)) as server:
        there = f"{host}:{server.port}"
        plain = await door.say(get(f"http://{there}/", there))
        tunnel = await door.say(f"CONNECT {there} HTTP/1.1\r\n\r\n".encode(), get("/", there))
        socked = await door.say(socks(host, server.port), get("/", there))
    allowed = verdict == "allowed"
    assert plain.startswith(b"HTTP/1.1 200" if allowed else b"HTTP/1.1 403")
    assert tunnel.startswith(b"HTTP/1.1 200" if allowed else b"HTTP/1.1 403")
    assert tunnel.endswith(b"hello") is allowed
    assert socked[:4] == (b"\5\0\5\0" if allowed else b"\5\0\5\2")
    assert [each.verdict for each in await door.lines(3)] == [verdict] * 3
    assert {each.protocol for each in door.door.journal.entries} == {"http", "connect", "socks"}
    assert server.visits == (3 if allowed else 0)


async def test_a_redirect_to_a_denied_host_is_the_clients_to_follow_and_denied(opening: Opening) -> None:
    door = opening(allow=("good.test:*",))
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://other.test/\r\nContent-Length: 0\r\n\r\n"
    async with serving_at(answering(moved)) as server:
        there = f"good.test:{server.port}"
        assert b"location: http://other.test/\r\n" in await door.say(get(f"http://{there}/", there))
    assert (await door.say(get("http://other.test/", "other.test"))).startswith(b"HTTP/1.1 403")
    assert [each.verdict for each in await door.lines(2)] == ["allowed", "denied"]


async def test_tls_goes_through_a_tunnel_unread(
    opening: Opening, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext
) -> None:
    door = opening(allow=("good.test:*",))
    async with serving_at(answering(OK), tls=server_tls) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        await writer.start_tls(client_tls, server_hostname="good.test")
        writer.write(get("/", "good.test"))
        assert await reader.readexactly(len(OK)) == OK
        writer.close()
    line = await door.line()
    assert (line.verdict, line.host) == ("allowed", "good.test")
    assert line.received_bytes > len(OK)


async def test_tls_on_its_own_port(opening: Opening, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext) -> None:
    door = opening(allow=("good.test",))
    async with serving_at(answering(OK), port=443, tls=server_tls):
        reader, writer = await door.connect("good.test:443")
        await writer.start_tls(client_tls, server_hostname="good.test")
        writer.write(get("/", "good.test"))
        assert await reader.readexactly(len(OK)) == OK
        writer.close()
        assert (await door.line()).verdict == "allowed"
        nothing = await door.connect("good.test:443")
        nothing[1].close()
        assert (await door.lines(2))[1].verdict == "allowed"


async def test_a_server_that_speaks_first_is_heard(opening: Opening) -> None:
    async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-Test\r\n")
        assert await reader.readline() == b"SSH-2.0-Mine\r\n"
        writer.write(b"\0\0\0\1")
        assert await reader.read(100) == b"\0\0\0\2"
        writer.write(b"bye")

    door = opening(allow=("good.test:*",))
    async with serving_at(ssh) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        assert await reader.readline() == b"SSH-2.0-Test\r\n"
        writer.write(b"SSH-2.0-Mine\r\n")
        assert await reader.readexactly(4) == b"\0\0\0\1"
        writer.write(b"\0\0\0\2")
        assert await read_all(reader) == b"bye"
        writer.close()
    line = await door.line()
    assert (line.verdict, line.sent_bytes, line.received_bytes) == ("allowed", 18, 21)


@pytest.mark.parametrize(
    "said",
    [
        b"\0\0\0\x08\x04\xd2\x16\x2f",
        b"U\0\0\1",
        b"\x16\x16",
        b"*1\r\n$4\r\nPING\r\n",
        b"EHLO me\r\n",
        b"\r\n",
        b"x" * 50,
    ],
)
async def test_any_other_protocol_goes_through_a_tunnel(opening: Opening, said: bytes) -> None:
    """PostgreSQL, MySQL, Redis, SMTP: what they say first is not waited upon."""
    door = opening(allow=("good.test:*",))
    async with serving_at(echo) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        writer.write(said)
        if said in (b"\r\n", b"x" * 50):  # it could become HTTP: it is held until it is clear, or over
            writer.write_eof()
        assert await reader.readexactly(len(said)) == said
        writer.close()
    assert (await door.line()).verdict == "allowed"


async def test_a_half_closed_client_still_gets_the_answer(opening: Opening) -> None:
    """Half-closed, either way round."""

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        total = 0
        while part := await reader.read(65536):
            total += len(part)
        writer.write(str(total).encode())

    async def farewell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"that was all")
        writer.write_eof()
        assert await reader.readexactly(1_000_000)

    door = opening(allow=("good.test:*",))
    async with serving_at(count) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        writer.write(b"\0" * 3_000_000)
        writer.write_eof()
        assert await read_all(reader) == b"3000000"
        writer.close()
    async with serving_at(farewell) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        assert await read_all(reader) == b"that was all"
        writer.write(b"\0" * 1_000_000)
        await writer.drain()
        writer.write_eof()
        entries = await door.lines(2)
        writer.close()
        assert len(server.heard) == 1_000_000
    assert [(each.verdict, each.sent_bytes) for each in entries] == [("allowed", 3_000_000), ("allowed", 1_000_000)]


@pytest.mark.parametrize(
    ("asked", "answered", "given"),
    [
        (get("{}/", "{h}"), OK, b"Content-Length: 5\r\nConnection: close\r\n\r\nhello"),
        (
            get("{}/", "{h}"),
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nT: r\r\n\r\n",
            b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n",
        ),
        (
            get("{}/", "{h}", version="1.0"),
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello",
        ),
        (get("{}/", "{h}"), b"HTTP/1.0 200 OK\r\n\r\nhello", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"),
        (
            get("{}/", "{h}", method="HEAD"),
            b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n",
            b"Content-Length: 500\r\nConnection: close\r\n\r\n",
        ),
        (
            get("{}/", "{h}"),
            b"HTTP/1.1 204 No Content\r\n\r\n",
            b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n",
        ),
        (
            get("{}/", "{h}"),
            b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
            b"Content-Length: 9\r\nConnection: close\r\n\r\n",
        ),
        (
            get("{}/", "{h}"),
            b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK,
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello",
        ),
    ],
)
async def test_an_answer_ends_where_it_ends(opening: Opening, asked: bytes, answered: bytes, given: bytes) -> None:
    door = opening(allow=("good.test:*",))
    async with serving_at(answering(answered)) as server:
        there = f"good.test:{server.port}"
        raw = asked.replace(b"{}", f"http://{there}".encode()).replace(b"{h}", there.encode())
        answer = await door.say(raw)
    assert given in answer
    if b"chunked" in given:
        assert answer.endswith(b"0\r\n\r\n")
    assert (await door.line()).verdict == "allowed"


async def test_an_answer_and_a_refusal_end_cleanly(opening: Opening) -> None:
    """And not with a reset, which some clients take for an error though they have read all."""
    door = opening(allow=("good.test:*",))
    async with serving_at(answering(OK)) as server:
        there = f"good.test:{server.port}"
        for asked in [get(f"http://{there}/", there), get("http://evil.test/", "evil.test"), get("/", "x")] * 20:
            reader, writer = await door.open()
            writer.write(asked)
            assert (await reader.read()).startswith(b"HTTP/1.1 ")
            await asyncio.sleep(0)
            assert await reader.read() == b"" and reader.exception() is None
            writer.close()


async def test_bodies_are_framed_anew(opening: Opening) -> None:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        end = b"0\r\n\r\n" if b"chunked" in head else b"world"
        await reader.readuntil(end)
        writer.write(OK)

    door = opening(allow=("good.test:*",))
    async with serving_at(take) as server:
        there = f"good.test:{server.port}"
        head = get(f"http://{there}/", there, "Transfer-Encoding: chunked", method="POST")
        assert (await door.say(head, b"5;ext\r\nhello\r\n", b"5\r\nworld\r\n0\r\nTrailer: x\r\n\r\n")).endswith(
            b"hello"
        )
        divided, joined = b"5\r\nhello\r\n5\r\nworld\r\n0\r\n\r\n", b"a\r\nhelloworld\r\n0\r\n\r\n"
        assert server.heard.partition(b"\r\n\r\n")[2] in (divided, joined)
        head = get(f"http://{there}/", there, "Content-Length: 10", "Expect: 100-continue", method="PUT")
        answer = await door.say(head, b"helloworld")
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert server.heard.endswith(b"Content-Length: 10\r\nConnection: close\r\n\r\nhelloworld")
    assert b"xpect" not in server.heard
    assert [each.verdict for each in await door.lines(2)] == ["allowed", "allowed"]


async def test_an_answer_before_the_end_of_the_body_is_given(opening: Opening) -> None:
    """A server that says at once that it is too large."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    door = opening(allow=("good.test:*",))
    async with serving_at(refuse) as server:
        there = f"good.test:{server.port}"
        head = get(f"http://{there}/", there, "Content-Length: 50000000", method="POST")
        answer = await door.say(head, b"x" * 10_000)
    assert answer.startswith(b"HTTP/1.1 413 Too Large\r\n")
    assert (await door.line()).verdict == "allowed"


async def test_a_websocket_goes_through_a_tunnel(opening: Opening) -> None:
    async def upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Connection: Upgrade\r\nUpgrade: websocket\r\n" in head
        assert b"sec-websocket-key: k" in head
        writer.write(
            b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: a\r\n\r\n"
        )
        await echo(reader, writer)

    door = opening(allow=("good.test:*",))
    async with serving_at(upgrade) as server:
        there = f"good.test:{server.port}"
        reader, writer = await door.connect(there)
        writer.write(get("/ws", there, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: k"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"sec-websocket-accept: a\r\nUpgrade: websocket\r\nConnection: Upgrade" in head
        writer.write(b"\x81\x05hello")
        assert await reader.readexactly(7) == b"\x81\x05hello"
        writer.write_eof()
        await read_all(reader)
        writer.close()
    assert (await door.line()).verdict == "allowed"


@pytest.mark.parametrize(
    ("said", "answered", "reason"),
    [
        (b"\5\1\2", b"\5\xff", "without authentication"),
        (b"\5\0", b"\5\xff", "without authentication"),
        (socks("good.test", 80, command=2), b"\5\0\5\7", "only CONNECT"),
        (socks("good.test", 80, command=3), b"\5\0\5\7", "only CONNECT"),
        (b"\5\1\0\5\1\0\2good", b"\5\0\5\x08", "unknown kind"),
        (b"\5\1\0\4\1\0\1\1\1\1\1\0\x50", b"\5\0\5\1", "version 5"),
        (b"\5\1\0\5\1\0\3\0\0\x50", b"\5\0\5\1", "not the name of a host"),
        (b"\5\1\0\5\1\0\3\4\xff\xff\xff\xff\0\x50", b"\5\0\5\1", "not ASCII"),
        (socks("good.test", 0), b"\5\0\5\1", "not a port"),
        (b"\5\1\0\5\1\0\1\x0a\0\0\1\0\x50", b"\5\0\5\2", "no public address"),
        (b"\5\1\0\5\1\0\4" + b"\0" * 10 + b"\xff\xff\x0a\0\0\1\0\x50", b"\5\0\5\2", "no public address"),
        (socks("evil.test", 80), b"\5\0\5\2", "not allowed"),
        (socks("unknown.invalid", 80), b"\5\0\5\4", "has no address"),
        (socks("other.test", 1), b"\5\0\5\5", "refuses connections"),
        (b"\4\1\0\x50\1\1\1\1user\0", b"\0\x5b", "only version 5"),
    ],
)
async def test_socks_has_a_code_for_each_refusal(opening: Opening, said: bytes, answered: bytes, reason: str) -> None:
    door = opening(allow=("good.test:*", "other.test:*", "unknown.invalid:*", "10.0.0.0/8:*"))
    assert (await door.say(said)).startswith(answered)
    line = await door.line()
    assert line.protocol == "socks"
    assert line.verdict == ("failed" if answered[3:] in (b"\4", b"\5") else "denied")
    assert reason in line.reason


async def test_an_unreachable_host_is_logged_as_failed(opening: Opening) -> None:
    door = opening(allow=("good.test:*", "unknown.invalid"))
    assert (await door.say(b"CONNECT good.test:1 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 502 ")
    assert (await door.say(get("http://unknown.invalid/", "unknown.invalid"))).startswith(b"HTTP/1.1 502 ")
    assert [(each.verdict, each.host) for each in await door.lines(2)] == [
        ("failed", "good.test"),
        ("failed", "unknown.invalid"),
    ]


async def test_of_several_addresses_the_first_that_answers_is_used(opening: Opening) -> None:
    async with serving_at(answering(OK)) as server:
        hosts = {"good.test": f"10.0.0.1, {OTHER}, {GOOD}"}
        door = opening(allow=("good.test:*",), settings={"hosts": hosts})
        there = f"good.test:{server.port}"
        assert (await door.say(get(f"http://{there}/", there))).endswith(b"hello")
    assert (await door.line()).verdict == "allowed"


async def test_https_is_not_fetched_by_the_proxy(opening: Opening) -> None:
    door = opening(allow=("*",))
    answer = await door.say(get("https://good.test/", "good.test"))
    assert answer.startswith(b"HTTP/1.1 400 ") and b"use CONNECT" in answer
    assert (await door.line()).verdict == "denied"


async def test_the_door_has_no_pages_of_its_own_unless_packages_are_served(opening: Opening) -> None:
    door = opening(allow=("*",))
    assert b"packages.enabled" in await door.say(get("/pypi/simple/", "127.0.0.1:49980"))
    line = await door.line()
    assert (line.protocol, line.verdict) == ("package", "denied")


async def test_a_new_policy_ends_disallowed_connections(opening: Opening) -> None:
    from cloche.network_policy import NetworkPolicy

    door = opening(allow=("good.test:*", "other.test:*"))
    async with serving_at(echo) as server, serving_at(echo, OTHER) as other:
        one = await door.connect(f"good.test:{server.port}")
        two = await door.connect(f"other.test:{other.port}")
        for _, writer in (one, two):
            writer.write(b"\0")
        assert await one[0].readexactly(1) == await two[0].readexactly(1) == b"\0"
        door.door.replace(NetworkPolicy(allow=("good.test:*",)))
        assert await read_all(two[0]) == b""
        (line,) = await door.lines(1)
        assert (line.verdict, line.host, line.sent_bytes) == ("denied", "other.test", 1)
        assert "ended by a new policy" in line.reason
        one[1].write(b"\1")
        assert await one[0].readexactly(1) == b"\1"
        door.door.replace(NetworkPolicy(allow=("*:*",), deny=(f"{GOOD}/32",)))  # where it leads, now
        assert await read_all(one[0]) == b""
    assert (await door.lines(2))[1].verdict == "denied"
    assert (await _denied(door, "other.test")) is False


async def _denied(door: Doorway, host: str) -> bool:
    return (await door.say(f"CONNECT {host}:1 HTTP/1.1\r\n\r\n".encode())).startswith(b"HTTP/1.1 403")
