"""From inside of real sandboxes of a real server: what programs reach, what they do not, and what they cannot break."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import serving, wait_until
from tests.network.carried import httpx_archive
from tests.network.conftest import GOOD, OTHER, answering, echo, serving_at

import cloche
from cloche.engine.sandboxes.network import DOOR_PORT

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Far(NamedTuple):
    """Servers of this process, in a thread of their own."""

    web: int
    moved: int  # answers with a redirect to other.test
    tls: int
    echo: int


@pytest.fixture(scope="module")
def far(server_tls: ssl.SSLContext) -> Iterator[Far]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    stack = AsyncExitStack()

    async def start() -> Far:
        web = await stack.enter_async_context(serving_at(answering(OK)))
        elsewhere = f"HTTP/1.1 302 Found\r\nLocation: http://other.test:{web.port}/\r\nContent-Length: 0\r\n\r\n"
        moved = await stack.enter_async_context(serving_at(answering(elsewhere.encode())))
        tls = await stack.enter_async_context(serving_at(answering(OK), tls=server_tls))
        echoes = await stack.enter_async_context(serving_at(echo))
        return Far(web.port, moved.port, tls.port, echoes.port)

    yield asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Host(NamedTuple):
    """A server whose sandboxes can be allowed good.test, and its log."""

    url: str
    key: str
    log: Path
    pid: int

    def sandbox(self, **network: object) -> cloche.Sandbox:
        return cloche.Sandbox(network=network or {"allow": ["good.test:*"]}, url=self.url, api_key=self.key)


@pytest.fixture(scope="module")
def host(bare_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    log = tmp_path_factory.mktemp("host") / "log"
    env = {
        "CLOCHE_NETWORK_ALLOW": "*.test:*,good.test:*",
        "CLOCHE_NETWORK_INTERNAL": f"{GOOD},{OTHER}",
        "CLOCHE_NETWORK_HOSTS": f"good.test={GOOD} other.test={OTHER}",
    }
    with serving(bare_dir, env=env, log=log) as running:
        yield Host(running.url, running.key, log, running.process.pid)


FETCH = """
import ssl, urllib.error, urllib.request
def fetch(url):
    try:
        context = ssl._create_unverified_context() if url.startswith("https") else None
        return urllib.request.urlopen(url, timeout=60, context=context).read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    except OSError as error:
        return f"{type(error).__name__} {error}"
"""


def test_programs_reach_allowed_hosts_and_get_an_error_for_others(host: Host, far: Far) -> None:
    with host.sandbox() as box:
        box.run(FETCH)
        assert box.run(f"fetch('http://good.test:{far.web}/')").text == "'hello'"
        assert box.run(f"fetch('https://good.test:{far.tls}/')").text == "'hello'"
        assert (
            "other.test:80 is not allowed by the sandbox's network policy"
            in box.run("fetch('http://other.test/')").text
        )
        assert "403" in box.run("fetch('https://other.test/')").text
        redirected = box.run(f"fetch('http://good.test:{far.moved}/')").text
        assert redirected.startswith(("'403", '"403'))
        lines = [(each.protocol, each.host, each.verdict) for each in box.network.log()]
    assert lines == [
        ("http", "good.test", "allowed"),
        ("connect", "good.test", "allowed"),
        ("http", "other.test", "denied"),
        ("connect", "other.test", "denied"),
        ("http", "good.test", "allowed"),
        ("http", "other.test", "denied"),
    ]


EACH = "for url in __import__('os').environ['URLS'].split(): print("
CLIENTS = {
    "curl": "for url in $URLS; do curl -sS -o /dev/null -w '%{http_code} ' $url; done",
    "wget": "for url in $URLS; do wget -qO /dev/null --tries 1 $url && printf '200 '; done",
    "urllib": f'python -c "import urllib.request\n{EACH}urllib.request.urlopen(url).status)"',
    "requests": f'python -c "import requests\n{EACH}requests.get(url).status_code)"',
    "httpx": f'PYTHONPATH=/tmp/httpx.zip python -c "import httpx\n{EACH}httpx.get(url).status_code)"',
    "fetch": (
        "node --input-type=module -e "
        "'for (const url of process.env.URLS.split(\" \")) console.log((await fetch(url)).status)'"
    ),
}


def test_programs_reach_their_own_sandbox_by_its_names_and_the_rest_by_the_door(host: Host, far: Far) -> None:
    own = [f"http://{name}:8000/" for name in ("localhost", "127.0.0.1", "0.0.0.0", "cloche")]
    listen = (
        "import http.server, threading\n"
        "class Page(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.send_header('Content-Length', '0'); self.end_headers()\n"
        "    def log_message(self, *_): pass\n"
        "server = http.server.ThreadingHTTPServer(('0.0.0.0', 8000), Page)\n"
        "threading.Thread(target=server.serve_forever, daemon=True).start()"
    )
    with host.sandbox() as box:
        assert box.run(listen).error is None
        box.files.write("/tmp/httpx.zip", httpx_archive())
        env = {"URLS": " ".join([*own, f"http://good.test:{far.web}/"])}
        clients = CLIENTS.keys() - (set() if shutil.which("wget") else {"wget"})
        said = {name: box.commands.run(CLIENTS[name], env=env) for name in clients}
        assert {name: each.stdout.split() for name, each in said.items()} == dict.fromkeys(clients, ["200"] * 5), said
        assert [each.host for each in box.network.log()] == ["good.test"] * len(clients)


def test_programs_that_know_no_proxy_have_no_network(host: Host) -> None:
    with host.sandbox() as box:
        answer = box.run(
            "import socket\n"
            "def go(*to):\n"
            "    try: socket.create_connection(to, 5)\n"
            "    except OSError as error: return type(error).__name__\n"
            f"print(go('192.0.2.1', 80), go('{GOOD}', 80), go('good.test', 80))"
        )
        assert answer.stdout.split() == ["OSError", "ConnectionRefusedError", "gaierror"]
        assert box.network.log() == []


def test_tls_for_another_host_fails_as_tls(host: Host, far: Far) -> None:
    with host.sandbox() as box:
        answer = box.run(
            "import http.client, ssl\n"
            f"connection = http.client.HTTPSConnection('127.0.0.1', {DOOR_PORT}, timeout=30,\n"
            "    context=ssl._create_unverified_context())\n"
            f"connection.set_tunnel('good.test', {far.tls})\n"
            "connection._context = type('C', (), {'wrap_socket': lambda self, sock, server_hostname:\n"
            "    ssl._create_unverified_context().wrap_socket(sock, server_hostname='other.test')})()\n"
            "try: connection.request('GET', '/')\n"
            "except ssl.SSLError as error: print(error.reason)"
        )
        assert answer.stdout.strip() == "TLSV1_UNRECOGNIZED_NAME"
        (line,) = box.network.log()
        assert (line.verdict, line.host) == ("denied", "good.test")
        assert "names other.test" in line.reason


FLOOD = """
import socket
said = b"CONNECT good.test:{port} HTTP/1.1\\r\\n\\r\\n"
held, answers = [], []
for _ in range(500):
    one = socket.socket(); one.settimeout(60); one.connect(("127.0.0.1", {door})); held.append(one)
for one in held:
    try: one.sendall(said); answers.append(one.recv(12).decode())
    except OSError as error: answers.append(type(error).__name__)
from collections import Counter
print(Counter(answers)["HTTP/1.1 200"], len(answers))
"""


def test_five_hundred_connections_at_once_do_not_affect_others(host: Host, far: Far) -> None:
    with host.sandbox() as box, host.sandbox() as neighbour:
        neighbour.run(FETCH)
        running = threading.Thread(target=lambda: seen.append(box.run(FLOOD.format(port=far.echo, door=DOOR_PORT))))
        seen: list[cloche.Result] = []
        running.start()
        asked = 0
        while running.is_alive() or asked < 3:
            assert neighbour.run(f"fetch('http://good.test:{far.web}/')").text == "'hello'"
            with urllib.request.urlopen(f"{host.url}/health", timeout=30) as health:
                assert health.status == 200
            asked += 1
        running.join()
        through, tried = map(int, seen[0].stdout.split())
        assert tried == 500
        assert 0 < through <= 128
        box.run("for one in held: one.close()")
        wait_until(lambda: sum(each.verdict != "open" for each in box.network.log()) == 500)
        verdicts = Counter(each.verdict for each in box.network.log())
        assert verdicts["allowed"] == through
        assert verdicts["denied"] == 500 - through
        assert len(neighbour.network.log()) == asked


@pytest.mark.long
def test_a_flood_of_denials_is_a_few_lines_for_the_server(host: Host) -> None:
    code = (
        "import socket\n"
        "for _ in range(1500):\n"
        f"    with socket.create_connection(('127.0.0.1', {DOOR_PORT}), 60) as one:\n"
        "        one.sendall(b'CONNECT denied.test:443 HTTP/1.1\\r\\n\\r\\n'); one.recv(12)\n"
    )
    with host.sandbox() as box:
        began = time.monotonic()
        assert box.run(code).error is None
        took = time.monotonic() - began
        assert len(box.network.log()) == 1000
    wait_until(lambda: "network.left_out" in host.log.read_text())
    lines = [line for line in host.log.read_text().splitlines() if "denied.test" in line]
    assert len(lines) <= 60 + 2 * (took + 1)


def hold(box: cloche.Sandbox, port: int) -> None:
    """Has a program open a tunnel, and keep it."""
    said = (
        "import socket\n"
        f"one = socket.create_connection(('127.0.0.1', {DOOR_PORT}))\n"
        f"one.sendall(b'CONNECT good.test:{port} HTTP/1.1\\r\\n\\r\\n'); one.recv(100)\n"
        "one.sendall(b'\\0'); one.recv(1)"
    )
    assert box.run(said).text == "b'\\x00'"


def test_sandboxes_that_came_and_went_leave_no_descriptors(host: Host, far: Far) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{host.pid}/fd"))

    with host.sandbox() as box:  # what stays for the first one's sake
        hold(box, far.echo)
    time.sleep(1)  # the pool fills up again, and what its end closes is closed
    before = descriptors()
    boxes = [host.sandbox() for _ in range(3)]
    for box in boxes:
        hold(box, far.echo)
        hold(box, far.echo)
    assert descriptors() > before
    for box in boxes:
        box.close()
    wait_until(lambda: descriptors() <= before)


def test_a_sandbox_that_dies_leaves_a_line_and_no_connection(host: Host, far: Far) -> None:
    box = host.sandbox()
    ended = f"sandbox={box.id}"
    hold(box, far.echo)
    assert [each.verdict for each in box.network.log()] == ["open"]
    box.close()
    wait_until(lambda: any(ended in line for line in _ended_by_the_end(host)))
    (line,) = [line for line in _ended_by_the_end(host) if ended in line]
    assert "network.allowed" in line and "sent_bytes=1 received_bytes=1" in line


def _ended_by_the_end(host: Host) -> list[str]:
    return [line for line in host.log.read_text().splitlines() if "'the sandbox ended'" in line]
