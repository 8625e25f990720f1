"""What a program or a server does to get around a policy: each ends as the policy says, with one line that says why."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import ssl
import struct

import pytest
import uvloop
from tests.network.conftest import GOOD, OTHER, Doorway, Opening, answering, echo, read_all, serving_at
from tests.network.test_client_hello import extension, hello, real_hello, records, server_name

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the")

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
ALERT = b"\x15\x03\x03\x00\x02\x02\x70"  # fatal, unrecognized_name


@pytest.fixture(params=[pytest.param("asyncio", marks=pytest.mark.long), "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(65536):
        pass


async def refused(door: Doorway, said: bytes, reason: str, *, ends: bool = False) -> bytes:
    """What was answered to what must be denied, and logged so."""
    answer = await door.say(said, ends=ends)
    line = (await door.lines(door.visits))[-1]
    assert line.verdict == "denied", line
    assert reason in line.reason
    return answer


# ---- where it wants to go


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "017700000001",
        "127.0.0.1.",
        "0",
        "0.0.0.0",
        "169.254.169.254",
        "2852039166",
        "0xA9FEA9FE",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::FFFF:a9fe:a9fe]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:0001::]",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "localhost",
        "LOCALHOST.",
        "10.0.0.1",
        "192.168.0.1",
    ],
)
async def test_no_spelling_leads_to_the_host(opening: Opening, host: str) -> None:
    door = opening(allow=("*:*",))
    there = f"{host}:80"
    assert b" 403 " in await refused(door, f"CONNECT {there} HTTP/1.1\r\n\r\n".encode(), "no public address")
    asked = f"GET http://{there}/latest/meta-data HTTP/1.1\r\nHost: {there}\r\n\r\n".encode()
    assert b" 403 " in await refused(door, asked, "no public address")


@pytest.mark.parametrize(
    "host",
    "[fe80::1%25lo] [::1%lo] 127.0.0.1%00 good.test%2eother.test 1.2.3.4.5 256.1.1.1 good..test [good.test]".split(),
)
async def test_malformed_hosts_are_not_connected_to(opening: Opening, host: str) -> None:
    door = opening(allow=("*:*",))
    assert b" 400 " in await refused(door, f"CONNECT {host}:80 HTTP/1.1\r\n\r\n".encode(), "")


async def test_a_name_that_leads_elsewhere_the_second_time_is_asked_once(opening: Opening) -> None:
    """Rebinding: the address that was checked is the one that is connected to."""
    answers = [[GOOD], ["169.254.169.254"], ["127.0.0.1"], [OTHER]]
    asked = []

    async def resolve(name: str):
        asked.append(name)
        return [ipaddress.ip_address(each) for each in answers[len(asked) - 1]]

    door = opening(allow=("turns.test:*",), resolve=resolve)
    async with serving_at(answering(OK)) as server, serving_at(answering(OK), OTHER, 0):
        said = f"GET http://turns.test:{server.port}/ HTTP/1.1\r\nHost: turns.test:{server.port}\r\n\r\n".encode()
        assert (await door.say(said)).endswith(b"hello")
        assert len(asked) == 1
        for where in ("169.254.169.254", "127.0.0.1"):
            assert where.encode() not in await refused(door, said, "turns.test leads to no public address")
    assert len(asked) == 3


async def test_private_addresses_among_public_ones_are_left_out(opening: Opening) -> None:
    async def resolve(name: str):
        return [ipaddress.ip_address(each) for each in ("10.0.0.1", "::1", "::ffff:192.168.0.1", GOOD)]

    door = opening(allow=("mixed.test:*",), resolve=resolve)
    async with serving_at(answering(OK)) as server:
        said = f"CONNECT mixed.test:{server.port} HTTP/1.1\r\n\r\n".encode()
        answer = await door.say(said + f"GET / HTTP/1.1\r\nHost: mixed.test:{server.port}\r\n\r\n".encode())
    assert answer.endswith(b"hello")
    assert (await door.line()).verdict == "allowed"


async def test_a_resolver_that_never_answers_is_not_waited_for(opening: Opening) -> None:
    never = asyncio.Event()

    async def resolve(name: str):
        if name == "hangs.test":
            await never.wait()
        return [ipaddress.ip_address(GOOD)]

    door = opening(allow=("*:*",), resolve=resolve, settings={"connect_seconds": 0.8, "lookups": 2})
    hanging = [door.say(b"CONNECT hangs.test:80 HTTP/1.1\r\n\r\n") for _ in range(5)]
    for answer in await asyncio.gather(*hanging):
        assert answer.startswith(b"HTTP/1.1 504 ")
    never.set()
    async with serving_at(answering(OK)) as server:
        there = f"good.test:{server.port}"
        assert (await door.say(f"GET http://{there}/ HTTP/1.1\r\nHost: {there}\r\n\r\n".encode())).endswith(b"hello")
    assert [each.verdict for each in await door.lines(6)] == ["failed"] * 5 + ["allowed"]


# ---- TLS


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (real_hello("other.test"), "names other.test"),
        (real_hello(None), "names no server"),
        (real_hello("good.test.other.test"), "names good.test.other.test"),
        (records(hello(server_name(b"good.test\0.other.test"))), "in a way that is not known"),
        (records(hello(server_name(b"good.test."))), "names good.test."),
        (records(hello(server_name(b"good.test"), server_name(b"other.test"))), "names two servers"),
        (records(hello(server_name(b"public.example"), extension(0xFE0D, bytes(200)))), "names public.example"),
        (b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00", "does not begin with a ClientHello"),
        (b"\x16\x03\x01\xff\xff", "length that cannot be"),
        (records(real_hello("other.test")[5:], 40), "names other.test"),
    ],
    ids=lambda given: given if isinstance(given, str) else "hello",  # its bytes are others in each process
)
@pytest.mark.parametrize("port", [443, 0])
async def test_tls_that_names_another_server_is_refused_with_an_alert(
    opening: Opening, said: bytes, reason: str, port: int
) -> None:
    door = opening(allow=("good.test:*",))
    async with serving_at(echo, port=port) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        for at in range(0, len(said), 100):
            writer.write(said[at : at + 100])
            await asyncio.sleep(0)
        assert await read_all(reader) == ALERT
        writer.close()
        line = await door.line()
        assert (line.verdict, line.host, line.sent_bytes) == ("denied", "good.test", 0)
        assert reason in line.reason
        assert server.heard == b""


async def test_a_hello_in_pieces_is_read_whole(opening: Opening) -> None:
    """Segments of one byte, records of twenty."""
    door = opening(allow=("good.test:*",))
    said = records(real_hello("GOOD.test")[5:], 20)
    async with serving_at(echo) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        for byte in said:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert await reader.readexactly(len(said)) == said
        writer.close()
    assert (await door.line()).verdict == "allowed"


@pytest.mark.parametrize("port", [443, 0])
@pytest.mark.parametrize("name", ["good.test", "other.test"])
async def test_a_second_hello_names_the_same_server(opening: Opening, name: str, port: int) -> None:
    """As a server asks for that knows no key of the first: some go by the name in the second."""
    door = opening(allow=("good.test:*",))
    first = records(hello(server_name(b"good.test"), extension(42, b"")))
    between = b"\x14\x03\x03\x00\x01\x01" + b"\x17\x03\x03\x00\x05early" + b"\x15\x03\x03\x00\x02\x01\x5a"
    second = records((rest := real_hello(name)[5:])[:1], 1) + records(rest[1:], 30)
    async with serving_at(echo, port=port) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        writer.write(first + between)
        assert await reader.readexactly(len(first + between)) == first + between
        writer.write(second)
        writer.write_eof()
        assert await read_all(reader) == (second if name == "good.test" else ALERT)
        writer.close()
    assert (await door.line()).verdict == ("allowed" if name == "good.test" else "denied")


@pytest.mark.parametrize("length", [64 << 10, 131_396])
@pytest.mark.parametrize("first", [1, 3, 16_000])
async def test_a_second_hello_that_is_too_large_is_refused(opening: Opening, length: int, first: int) -> None:
    """Servers would read it, and go by the name in it."""
    door = opening(allow=("good.test:*",))
    second = b"\x01" + length.to_bytes(3, "big") + bytes(20_000)
    said = real_hello("good.test")
    async with serving_at(echo) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        writer.write(said)
        assert await reader.readexactly(len(said)) == said
        writer.write(records(second[:first]) + records(second[first:]))
        writer.write_eof()
        assert await read_all(reader) == ALERT
        writer.close()
        assert server.heard == said
    line = await door.line()
    assert line.verdict == "denied" and "a ClientHello can have" in line.reason


async def test_records_without_end_before_a_second_hello_are_refused(opening: Opening) -> None:
    door = opening(allow=("good.test:*",))
    async with serving_at(silent) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        writer.write(real_hello("good.test") + b"\x15\x03\x03\x00\x02\x01\x5a" * 2000)
        assert await read_all(reader) == ALERT
        writer.close()
    assert "too much follows on the ClientHello" in (await door.line()).reason


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"\x16\x03",
        b"\x16\x03\x03\x00\x20\x10\x00\x00\x1cx",
        b"\x17\x03\x03\x00\x02hi",
        b"\x14\x03",
        b"\x16\x03\x03\x00\x28\x01\x7f" + bytes(38),
    ],
)
async def test_bytes_after_a_hello_pass_unchanged(opening: Opening, rest: bytes) -> None:
    door = opening(allow=("good.test:*",))
    said = real_hello("good.test") + rest
    async with serving_at(echo) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        writer.write(said)
        writer.write_eof()
        assert await read_all(reader) == said
        writer.close()
    line = await door.line()
    assert (line.verdict, line.sent_bytes, line.received_bytes) == ("allowed", len(said), len(said))


async def test_an_address_has_no_server_name(opening: Opening) -> None:
    door = opening(allow=("*:*",))
    async with serving_at(echo) as server:
        reader, writer = await door.connect(f"{GOOD}:{server.port}")
        writer.write(real_hello(None))
        assert (await reader.readexactly(1)) == b"\x16"
        writer.close()
        reader, writer = await door.connect(f"{GOOD}:{server.port}")
        writer.write(real_hello("good.test"))
        assert await read_all(reader) == ALERT
        writer.close()
    assert sorted(each.verdict for each in await door.lines(2)) == ["allowed", "denied"]


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: good.test\r\n\r\n", b"SSH-2.0-x\r\n", b"\0\1\2\3\4\5\6\7"])
async def test_the_port_of_tls_is_for_tls(opening: Opening, said: bytes) -> None:
    door = opening(allow=("good.test",))
    async with serving_at(echo, port=443) as server:
        reader, writer = await door.connect("good.test:443")
        writer.write(said)
        assert await read_all(reader) == ALERT
        writer.close()
        line = await door.line()
        assert line.verdict == "denied" and "not TLS" in line.reason
        assert server.heard == b""


async def test_an_honest_client_says_why_it_was_refused(opening: Opening, client_tls: ssl.SSLContext) -> None:
    door = opening(allow=("good.test:*",))
    async with serving_at(echo) as server:
        _, writer = await door.connect(f"good.test:{server.port}")
        with pytest.raises(ssl.SSLError, match="UNRECOGNIZED_NAME"):
            await writer.start_tls(client_tls, server_hostname="other.test")
        writer.close()
    assert (await door.line()).verdict == "denied"


# ---- HTTP in a tunnel


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.test:{p}\r\nHost: other.test\r\n\r\n",
        b"GET http://other.test/ HTTP/1.1\r\nHost: good.test:{p}\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\r\n\r\nGET / HTTP/1.1\r\nHost: other.test\r\n\r\n",
        b"GET  /  HTTP/1.1\r\nHost: other.test\r\n\r\n",
        b"GET\t/\tHTTP/1.1\r\nHost: other.test\r\n\r\n",
        b"get / http/1.1\nHost: other.test\n\n",
        b"GET / HTTP/1.1\nHost: other.test\n\n",
        b"ANYTHING / HTTP/1.1\r\nHost: other.test\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b" GET / HTTP/1.1\r\nHost: other.test\r\n\r\n",
        b"GET\x0b/\x0bHTTP/1.1\r\nHost: other.test\r\n\r\n",
        b"GET /\x80\x00\x01 HTTP/1.1\r\nHost: other.test\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: other.test\r\n\r\n",
        b"CONNECT other.test:80 HTTP/1.1\r\nHost: good.test:{p}\r\n\r\n",
        b"A" * 33 + b" / HTTP/1.1\r\nHost: other.test\r\n\r\n",
        b"A" * 10_000 + b" / HTTP/1.1\r\nHost: other.test\r\n\r\n",
        b"A" * 20_000,
        b"\r\n" * 10_000,
        b"GET\r/\rHTTP/1.1\r\nHost: other.test\r\n\r\n",
    ],
)
async def test_http_in_a_tunnel_is_for_the_host_of_the_tunnel(opening: Opening, said: bytes) -> None:
    door = opening(allow=("good.test:*",))
    async with serving_at(echo) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        said = said.replace(b"{p}", str(server.port).encode())
        for byte in said[:300]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        writer.write(said[300:])
        await read_all(reader)
        writer.close()
        assert (await door.line()).verdict == "denied"
        assert server.heard == b""


async def test_a_second_request_in_a_tunnel_goes_nowhere(opening: Opening) -> None:
    door = opening(allow=("good.test:*",))

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)

    async with serving_at(keep) as server:
        there = f"good.test:{server.port}".encode()
        both = b"GET / HTTP/1.1\r\nHost: " + there + b"\r\n\r\nGET /b HTTP/1.1\r\nHost: other.test\r\n\r\n"
        answer = await door.say(b"CONNECT " + there + b" HTTP/1.1\r\n\r\n" + both)
        assert answer.count(b"hello") == 1
        assert b"other.test" not in server.heard
        answer = await door.say(both.replace(b"GET / ", b"GET http://" + there + b"/ "))
        assert answer.count(b"hello") == 1
        assert b"other.test" not in server.heard
    assert [each.verdict for each in await door.lines(2)] == ["allowed", "allowed"]


async def test_a_tunnel_of_http_does_not_become_one_of_http_2(opening: Opening) -> None:
    door = opening(allow=("good.test:*",))
    async with serving_at(answering(OK)) as server:
        there = f"good.test:{server.port}"
        reader, writer = await door.connect(there)
        asked = f"GET / HTTP/1.1\r\nHost: {there}\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        writer.write(f"{asked}HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n".encode())
        assert (await read_all(reader)).endswith(b"hello")
        writer.close()
        assert server.heard == f"GET / HTTP/1.1\r\nHost: {there}\r\nConnection: close\r\n\r\n".encode()
    assert (await door.line()).verdict == "allowed"


async def test_a_server_that_speaks_before_it_is_asked_is_none_of_http(opening: Opening) -> None:
    async def eager(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await reader.read(1)

    door = opening(allow=("good.test:*",))
    async with serving_at(eager) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        assert await reader.readexactly(len(OK)) == OK
        writer.write(f"GET / HTTP/1.1\r\nHost: good.test:{server.port}\r\n\r\n".encode())
        assert b"sent data before a request" in await read_all(reader)
        writer.close()
    assert (await door.line()).verdict == "denied"


# ---- smuggling


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 0\r\n\r\nhello",
        b"Content-Length: 5, 5\r\n\r\nhello",
        b"Content-Length: +5\r\n\r\nhello",
        b"Transfer-Encoding: xchunked\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n , gzip\r\n\r\n0\r\n\r\n",
        b"X: a\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"X: a\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"X: a\0b\r\n\r\n",
        b"Expect: something\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\nhello0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5;\nx\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0\r\nGET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_a_request_that_can_be_read_in_two_ways_is_refused(opening: Opening, lines: bytes) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            pass

    door = opening(allow=("good.test:*",))
    async with serving_at(swallow) as server:
        there = f"good.test:{server.port}".encode()
        said = b"POST http://" + there + b"/ HTTP/1.1\r\nHost: " + there + b"\r\n" + lines
        answer = await refused(door, said + b"GET /smuggled HTTP/1.1\r\nHost: other.test\r\n\r\n", "")
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 417 "))
        assert b"smuggled" not in server.heard


@pytest.mark.parametrize(
    "said",
    [
        b"GET http://good.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n",
        b"GET http://good.test/ HTTP/1.1\r\nHost: good.test\r\nHost: other.test\r\n\r\n",
        b"GET http://good.test/ HTTP/1.1\r\n\r\n",
        b"GET http://good.test@other.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"GET http://other.test\\@good.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"GET http://good.test/ HTTP/1.1\r\n Host: good.test\r\n\r\n",
        b"GET http://good.test/\r\nHost: good.test\r\n\r\n",
        b"GET good.test:80 HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"GET * HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"CONNECT good.test HTTP/1.1\r\n\r\n",
        b"CONNECT http://good.test:80 HTTP/1.1\r\n\r\n",
        b"CONNECT good.test:80/ HTTP/1.1\r\n\r\n",
        b"CONNECT good.test:80 HTTP/1.1\r\nHost: other.test:80\r\n\r\n",
        b"CONNECT good.test:80 HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        b"CONNECT good.test:80 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"\x00\x01\x02\x03\r\n\r\n",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\r\nGET http://good.test/ HTTP/1.1\r\n\r\n",
        b"<script>alert(1)</script> / HTTP/1.1\r\n\r\n",
    ],
)
async def test_ambiguous_requests_are_refused(opening: Opening, said: bytes) -> None:
    door = opening(allow=("*:*",))
    answer = await refused(door, said, "")
    status, _, rest = answer.partition(b"\r\n")
    assert status == b"HTTP/1.1 400 Bad Request"
    assert b"script" not in rest


@pytest.mark.parametrize(
    "said",
    [
        b"CONNECT user:hunter2@good.test:443 HTTP/1.1\r\n\r\n",
        b"CONNECT https://good.test/?token=hunter2 HTTP/1.1\r\n\r\n",
        b"GET http://user:hunter2@good.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"GET http://good.test/?token=hunter2 HTTP/1.1\r\nHost: x@hunter2\r\n\r\n",
        b"\5\1\0\5\1\0\3\x0cuser@hunter2\0\x50",
        b"\5\1\0\5\1\0\3\x0c\x1b[2Jhunter2\n\0\x50",
    ],
)
async def test_malformed_hosts_are_not_logged(opening: Opening, said: bytes) -> None:
    """Paths, queries and passwords are the program's, and a terminal is the reader's."""
    door = opening(allow=("*:*",))
    await refused(door, said, "")
    assert "hunter2" not in repr(await door.line())


async def test_a_refusal_arrives_though_more_was_said_than_read(opening: Opening) -> None:
    """A close with unread bytes is a reset, and a reset can take the answer with it."""
    door = opening(allow=("good.test:*",))
    said = b"POST http://other.test/ HTTP/1.1\r\nHost: other.test\r\nContent-Length: 900000\r\n\r\n" + b"x" * 900_000
    assert b"other.test:80 is not allowed" in await refused(door, said, "not allowed")


# ---- servers that are not what they seem


@pytest.mark.parametrize(
    ("answered", "status"),
    [
        (b"", b"502"),
        (b"SSH-2.0-x\r\n", b"502"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"502"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", b"502"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", b"502"),
        (b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n", b"502"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", b"502"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 100, b"502"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000, b"502"),
    ],
)
async def test_an_answer_that_is_none_has_failed(opening: Opening, answered: bytes, status: bytes) -> None:
    door = opening(allow=("good.test:*",))
    async with serving_at(answering(answered)) as server:
        there = f"good.test:{server.port}"
        answer = await door.say(f"GET http://{there}/ HTTP/1.1\r\nHost: {there}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert (await door.line()).verdict == "failed"


@pytest.mark.parametrize(
    "answered",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n",
    ],
)
async def test_half_an_answer_does_not_look_like_a_whole_one(opening: Opening, answered: bytes) -> None:
    door = opening(allow=("good.test:*",))
    async with serving_at(answering(answered)) as server:
        there = f"good.test:{server.port}"
        reader, writer = await door.open()
        writer.write(f"GET http://{there}/ HTTP/1.1\r\nHost: {there}\r\n\r\n".encode())
        with pytest.raises(ConnectionResetError):
            while await reader.read(1):
                pass
        writer.close()
    assert (await door.line()).verdict == "failed"


async def test_a_reset_is_passed_on(opening: Opening) -> None:
    import socket as sockets

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        _reset(writer)

    def _reset(writer: asyncio.StreamWriter) -> None:
        own = writer.get_extra_info("socket")
        with sockets.socket(fileno=sockets.dup(own.fileno())) as same:
            same.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    door = opening(allow=("good.test:*",))
    async with serving_at(reset) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        writer.write(b"\0")
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.close()
        line = await door.line()
        assert (line.verdict, line.reason) == ("allowed", "the server broke it off")
    lost = asyncio.Event()

    async def notice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(100)
            await reader.read(100)
        except ConnectionResetError:
            lost.set()

    async with serving_at(notice) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        writer.write(b"\0")
        await writer.drain()
        while not server.heard:
            await asyncio.sleep(0.001)
        _reset(writer)
        async with asyncio.timeout(10):
            await lost.wait()
        line = (await door.lines(2))[1]
        assert (line.verdict, line.reason) == ("allowed", "the program broke it off")


async def test_a_refusal_after_the_server_has_ended(opening: Opening) -> None:
    """The program was told already that nothing more comes."""

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        await reader.read(1)

    door = opening(allow=("good.test:*",))
    async with serving_at(leave) as server:
        reader, writer = await door.connect(f"good.test:{server.port}")
        assert await reader.read() == b""
        writer.write(real_hello("other.test"))
        line = await door.line()
        writer.close()
    assert (line.verdict, "names other.test" in line.reason) == ("denied", True)


# ---- anything


def _spoilt(raw: bytes, chance: random.Random) -> bytes:
    spoilt = bytearray(raw)
    for _ in range(chance.choice([0, 1, 1, 2, 5])):
        at = chance.randrange(len(spoilt) + 1)
        what = chance.choice([b"\r\n", b"\n", b" ", b"\0", b"0", b"HTTP/1.1 ", bytes([chance.randrange(256)])])
        spoilt[at : at + chance.choice([0, 1, 5])] = what
    return bytes(spoilt[: chance.randrange(len(spoilt) + 1)] if chance.random() < 0.2 else spoilt)


async def test_any_exchange_ends_with_a_log_line_and_no_fault(opening: Opening) -> None:
    chance = random.Random(5)
    answers = [OK, OK.replace(b"Content-Length: 5", b"Transfer-Encoding: chunked"), b"HTTP/1.1 101 S\r\n\r\nxx", b""]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if chance.random() < 0.5:
            await reader.read(100)
        writer.write(_spoilt(chance.choice(answers), chance))
        if chance.random() < 0.3:
            writer.transport.abort()
        await reader.read(10)

    door = opening(allow=("good.test:*",), settings={"request_seconds": 0.2, "idle_seconds": 0.2})
    async with serving_at(serve) as server:
        there = f"good.test:{server.port}".encode()
        connect, host = b"CONNECT " + there + b" HTTP/1.1\r\n\r\n", b"Host: " + there + b"\r\n"
        socked = b"\5\1\0\5\1\0\3\x09good.test" + struct.pack("!H", server.port)
        sayings = [
            b"GET http://" + there + b"/ HTTP/1.1\r\n" + host + b"\r\n",
            b"POST http://"
            + there
            + b"/ HTTP/1.1\r\n"
            + host
            + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
            connect + b"GET / HTTP/1.1\r\n" + host + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
            connect + real_hello("good.test") * 2,
            socked + real_hello("good.test"),
            socked + b"SSH-2.0-x\r\n",
        ]
        for _ in range(8):
            said = [_spoilt(chance.choice(sayings), chance) for _ in range(40)]
            await asyncio.gather(*(door.say(each, ends=chance.random() < 0.4) for each in said))
        entries = await door.lines(320)
    assert not [each for each in entries if each.reason == "the proxy itself has failed"]
