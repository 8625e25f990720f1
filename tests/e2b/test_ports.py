"""Programs that listen inside a sandbox are reached through the server, by headers and by Host name."""

from __future__ import annotations

import inspect
import json
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest
from e2b_code_interpreter import Sandbox
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from cloche.app import ServerApp

# Echoes what it gets, over HTTP (with chunks both ways) and over WebSocket, with the standard library alone.
ECHO = """
import base64, hashlib, http.server, json, socketserver, struct, threading

class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_one(self):
        if self.headers.get("upgrade", "").lower() == "websocket":
            return self.websocket()
        body = b""
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
        said = json.dumps({"method": self.command, "path": self.path, "headers": dict(self.headers.items()),
                           "size": len(body), "digest": hashlib.sha256(body).hexdigest()}).encode()
        self.send_response(418)
        self.send_header("X-Inside", "yes")
        self.send_header("Set-Cookie", "a=1")
        self.send_header("Set-Cookie", "b=2")
        for name, value in {"Cache-Control": "public, max-age=9", "CDN-Cache-Control": "public", "Vary": "X-Own",
                            "Expires": "Thu, 01 Jan 2099 00:00:00 GMT", "X-Accel-Redirect": "/private"}.items():
            self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in (said[:10], said[10:]):
            self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(part), part))
        self.wfile.write(b"0\\r\\n\\r\\n")

    do_GET = do_POST = do_PUT = do_DELETE = handle_one

    def websocket(self):
        key = self.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.wfile.write(f"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
                         f"Sec-WebSocket-Accept: {accept}\\r\\n\\r\\n".encode())
        while True:
            first, second = self.rfile.read(2)
            size = second & 127
            if size == 126:
                size = struct.unpack(">H", self.rfile.read(2))[0]
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(self.rfile.read(size)))
            length = bytes([size]) if size < 126 else b"~" + struct.pack(">H", size)
            self.wfile.write(bytes([first]) + length + data)
            if first & 15 == 8:
                self.close_connection = True
                return

class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

threading.Thread(target=Server(("127.0.0.1", 3000), Echo).serve_forever, daemon=True).start()
"""


@pytest.fixture(scope="module")
def box(server):
    box = Sandbox.create(**server.e2b)
    assert box.run_code(ECHO).error is None
    yield box
    box.kill()


def routed(box: Sandbox, port: int = 3000) -> dict[str, str]:
    return {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": str(port)}


def test_a_request_arrives_as_it_was_sent_and_so_does_its_answer(server, box):
    content = bytes(range(256)) * 4000
    answer = httpx.put(f"{server.url}/a%2Fb/c?x=1&y=%20z", content=content, headers={**routed(box), "X-Own": "kept"})
    assert answer.status_code == 418
    assert answer.headers["x-inside"] == "yes"
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    said = answer.json()
    assert (said["method"], said["path"], said["size"]) == ("PUT", "/a%2Fb/c?x=1&y=%20z", len(content))
    assert said["headers"]["x-own"] == "kept"


def test_a_body_of_unknown_length_is_carried_in_chunks(server, box):
    answer = httpx.post(server.url, content=(b"x" * 1000 for _ in range(100)), headers=routed(box))
    assert answer.json()["size"] == 100_000


def test_a_program_never_sees_the_tokens_of_its_sandbox(server, box):
    secret = {"X-Access-Token": box._envd_access_token, "E2B-Traffic-Access-Token": box.traffic_access_token}
    seen = httpx.get(server.url, headers={**routed(box), **secret}).text
    assert not any(value and value in seen for value in secret.values())


def test_a_program_sees_the_cookies_of_a_browser_but_for_the_consoles(server, box):
    cookies = "a=1; __Host-cloche_session=SECRET; b=2; cloche_session=SECRET; cloche_sessions=3"
    seen = httpx.get(server.url, headers={**routed(box), "Cookie": cookies}).text
    assert "SECRET" not in seen
    assert "a=1; b=2; cloche_sessions=3" in seen


def test_a_port_is_reached_by_host_name(server, box):
    host = f"3000-{box.sandbox_id}.sandboxes.test"
    answer = httpx.get(f"{server.url}/by/name", headers={"Host": host})
    assert answer.json()["path"] == "/by/name"
    assert answer.json()["headers"]["Host"] == host


def our_paths() -> list[str]:
    """One below each prefix of the server's own, from the application itself."""
    found = re.findall(r'^            "([a-z0-9]+)":', inspect.getsource(ServerApp.__init__), re.MULTILINE)
    assert {"api", "v1", "mcp", "ui", "health", "metrics"} <= set(found)
    return [f"/{prefix}{rest}" for prefix in found if prefix != "e2b" for rest in ("", "/static/x/console.js")]


@pytest.mark.parametrize("path", [*our_paths(), "//ui/static/x/console.js", "/%75i/static/x/console.js"])
def test_headers_never_route_the_servers_own_paths_to_a_program(server, box, path):
    for headers in (routed(box), {**routed(box), "Host": f"3000-{box.sandbox_id}"}):
        answer = httpx.get(f"{server.url}{path}", headers=headers)
        assert "x-inside" not in answer.headers
    named = httpx.get(f"{server.url}{path}", headers={"Host": f"3000-{box.sandbox_id}.sandboxes.test"})
    assert named.headers["x-inside"] == "yes"
    address = f"ws://{urlsplit(server.url).netloc}{path}"
    with pytest.raises((InvalidStatus, ConnectionClosed)), connect(address, additional_headers=routed(box)) as socket:
        socket.send("inside?")
        socket.recv(timeout=20)


def test_an_answer_of_a_sandbox_is_cached_by_none_unless_its_host_name_is_its_own(server, box):
    token = {"X-Access-Token": box._envd_access_token}
    asked = [(path, routed(box, port)) for path in ("/x", "/e2b/x", "/health") for port in (3000, 49983, 49999)]
    for path, headers in [*asked, ("/x", routed(box, 3999)), ("/x", {"E2b-Sandbox-Id": "-"})]:
        if path == "/health" and headers["E2b-Sandbox-Port"] == "3000":
            continue  # the server's own
        answer = httpx.get(f"{server.url}{path}", headers={**headers, **token})
        assert answer.headers.get_list("cache-control") == ["private, no-store"]
        assert {"e2b-sandbox-id", "e2b-sandbox-port"} <= set(answer.headers["vary"].lower().replace(",", " ").split())
        assert not {"expires", "cdn-cache-control", "x-accel-redirect"} & set(answer.headers)
    named = httpx.get(f"{server.url}/x", headers={"Host": f"3000-{box.sandbox_id}.sandboxes.test"})
    assert named.headers["cache-control"] == "public, max-age=9"
    assert "x-accel-redirect" not in named.headers  # an order to the proxy in front


def test_health_with_headers_is_the_sandboxs_own_ports_as_clients_ask(server, box):
    token = {"X-Access-Token": box._envd_access_token}
    assert httpx.get(f"{server.url}/health", headers={**routed(box, 49983), **token}).status_code == 204
    assert httpx.get(f"{server.url}/health", headers={**routed(box, 49999), **token}).json() == "OK"
    assert "status" in httpx.get(f"{server.url}/health", headers=routed(box)).json()  # the server's own


@pytest.mark.parametrize("message", ["text", b"bytes \x00\xff", "x" * 5000])
def test_a_websocket_is_carried_both_ways(server, box, message):
    address = f"ws://{urlsplit(server.url).netloc}/socket"
    with connect(address, additional_headers=routed(box), compression=None) as socket:
        socket.send(message)
        assert socket.recv(timeout=20) == message


def test_a_port_without_a_listener_is_reported_closed(server, box):
    answer = httpx.get(server.url, headers=routed(box, 3999))
    assert answer.status_code == 502
    assert answer.json()["sandboxId"] == box.sandbox_id
    assert "port is not open" in answer.json()["message"]


def test_a_program_that_does_not_speak_http_is_said_not_to(server, box):
    code = "import socket, threading; s = socket.create_server(('127.0.0.1', 3001))\n"
    code += (
        "threading.Thread(target=lambda: [s.accept()[0].sendall(b'hello\\n') for _ in range(9)], daemon=True).start()"
    )
    assert box.run_code(code).error is None
    answer = httpx.get(server.url, headers=routed(box, 3001))
    assert (answer.status_code, "HTTP" in answer.json()["message"]) == (502, True)


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(server, box):
    code = """
import socket, threading
def serve(listening):
    while True:
        peer = listening.accept()[0]
        peer.recv(65536)
        peer.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 100\\r\\n\\r\\nhalf")
        peer.close()
threading.Thread(target=serve, args=(socket.create_server(("127.0.0.1", 3002)),), daemon=True).start()
"""
    assert box.run_code(code).error is None
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(server.url, headers=routed(box, 3002))


def test_where_public_traffic_is_off_a_token_is_needed(server):
    box = Sandbox.create(network={"allow_public_traffic": False}, **server.e2b)
    try:
        assert box.run_code(ECHO).error is None
        refused = httpx.get(server.url, headers=routed(box))
        assert (refused.status_code, refused.json()["code"]) == (403, 403)
        token = {"e2b-traffic-access-token": box.traffic_access_token}
        assert httpx.get(server.url, headers={**routed(box), **token}).status_code == 418
    finally:
        box.kill()


def test_a_port_of_a_sandbox_that_has_ended_is_not_found(server):
    box = Sandbox.create(**server.e2b)
    box.kill()
    answer = httpx.get(server.url, headers=routed(box))
    assert answer.status_code == 502
    assert "was not found" in answer.json()["message"]


@pytest.mark.long
def test_a_listener_that_never_accepts_blocks_no_other_request(server, box):
    code = "import socket; deaf = socket.socket(); deaf.bind(('127.0.0.1', 3003)); deaf.listen(0)\n"
    code += "held = [socket.socket() for _ in range(4)]\n"
    code += "for s in held: s.setblocking(False); s.connect_ex(('127.0.0.1', 3003))"
    assert box.run_code(code).error is None
    began = time.monotonic()
    assert "port is not open" in httpx.get(server.url, headers=routed(box, 3003), timeout=60).json()["message"]
    assert json.loads(httpx.get(server.url, headers=routed(box)).text)["method"] == "GET"
    assert time.monotonic() - began < 60


# Answers by rote, whatever it is asked, and closes; keeps what it was asked in `heads`.
ROTE = """
import socket, threading
heads = []
def serve(listening, answer, read_body):
    while True:
        peer = listening.accept()[0]
        heads.append(peer.recv(65536).decode())
        peer.sendall(answer)
        while read_body and peer.recv(65536):
            pass
        peer.close()
def by_rote(port, answer, read_body=False):
    listening = socket.create_server(("127.0.0.1", port))
    threading.Thread(target=serve, args=(listening, answer, read_body), daemon=True).start()
"""


@pytest.fixture(scope="module")
def rote(box):
    assert box.run_code(ROTE).error is None

    def start(port: int, answer: bytes) -> None:
        assert box.run_code(f"by_rote({port}, {answer!r})").error is None

    return start


def test_a_websocket_comes_with_one_host_and_the_address_as_it_was_written(server, box, rote):
    rote(3010, b"HTTP/1.1 403 Forbidden\r\nContent-Length: 3\r\n\r\nno!")
    address = f"ws://{urlsplit(server.url).netloc}/a%2Fb?c=%20d"
    with pytest.raises(InvalidStatus) as refused:
        connect(address, additional_headers=routed(box, 3010))
    assert (refused.value.response.status_code, refused.value.response.body) == (403, b"no!")
    head = json.loads(box.run_code("import json; print(json.dumps(heads[-1]))").logs.stdout[0])
    assert head.lower().count("\r\nhost:") == 1
    assert head.startswith("GET /a%2Fb?c=%20d HTTP/1.1\r\n")
    assert f"Host: {urlsplit(server.url).netloc}\r\n" in head


def test_an_answer_before_the_body_was_read_arrives(server, box, rote):
    rote(3011, b"HTTP/1.1 413 Too Much\r\nContent-Length: 4\r\n\r\nmuch")
    for _ in range(10):
        answer = httpx.post(server.url, content=b"x" * 3_000_000, headers=routed(box, 3011))
        assert (answer.status_code, answer.text) == (413, "much")


@pytest.mark.parametrize(
    ("port", "head", "status"),
    [(3012, b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1234", 304), (3013, b"HTTP/1.1 204 No\r\nX: y", 204)],
)
def test_an_answer_without_a_body_leaves_the_connection_usable(server, box, rote, port, head, status):
    rote(port, head + b"\r\n\r\n")
    with httpx.Client() as client:
        for _ in range(3):
            assert client.get(server.url, headers=routed(box, port)).status_code == status


def test_a_length_and_chunks_at_once_are_chunks(server, box, rote):
    rote(3014, b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
    assert httpx.get(server.url, headers=routed(box, 3014)).text == "hello"


def test_a_program_does_not_see_the_servers_key_but_its_own(server, box):
    for name, value in (("X-API-Key", server.key), ("Authorization", f"Bearer {server.key}")):
        assert server.key not in httpx.get(server.url, headers={**routed(box), name: value}).text
    own = httpx.get(server.url, headers={**routed(box), "Authorization": "Bearer own"}).json()
    assert own["headers"]["authorization"] == "Bearer own"


def test_a_sandbox_killed_during_a_request_to_its_port_is_not_found(server):
    box = Sandbox.create(**server.e2b)
    code = """
import socket, time
peer = socket.create_server(("127.0.0.1", 3020)).accept()[0]
peer.recv(9)
print("on", flush=True)
time.sleep(60)
"""
    with ThreadPoolExecutor() as threads:
        running = threads.submit(box.run_code, code, on_stdout=lambda _: box.kill())
        wait_until_listening(box, running)
        answer = httpx.get(server.url, headers=routed(box, 3020), timeout=60)
        with pytest.raises(Exception):
            running.result()
    assert (answer.status_code, "was not found" in answer.json()["message"]) == (502, True)


def wait_until_listening(box: Sandbox, running: Future) -> None:
    while not running.done() and ":0BCC " not in box.commands.run("cat /proc/net/tcp").stdout:
        pass


HEALTH = 'curl -s -o /dev/null -w "%{http_code}" http://0.0.0.0:49999/health'


def test_health_of_the_code_server_is_asked_for_inside_as_e2bs_own_tests_do(server):
    with Sandbox.create(**server.e2b) as box:
        assert box.commands.run(HEALTH).stdout == "200"
        assert box.commands.run("curl -s http://localhost:49999/health").stdout == '"OK"'
        assert box.commands.run(HEALTH.replace("/health", "/execute -d {}")).stdout == "404"
        box.pause()
        box.connect()
        assert box.commands.run(HEALTH).stdout == "200"


def test_a_program_may_have_the_port_of_the_code_server(server):
    with Sandbox.create(**server.e2b) as box:
        box.run_code(
            "import http.server, threading\n"
            "own = http.server.HTTPServer(('127.0.0.1', 49999), http.server.SimpleHTTPRequestHandler)\n"
            "threading.Thread(target=own.serve_forever, daemon=True).start()"
        )
        assert box.commands.run(HEALTH).stdout == "404"


def test_endless_requests_to_the_health_port_are_cut_off(server):
    """And they leave it open for others."""
    flood = (
        "import socket\n"
        "held = [socket.create_connection(('127.0.0.1', 49999)) for _ in range(64)]\n"
        "for each in held[:16]:\n"
        "    try: each.sendall(b'x' * 100_000); print(each.recv(1))\n"
        "    except OSError: print('reset')\n"
    )
    with Sandbox.create(**server.e2b) as box:
        box.commands.run("true")
        box.files.write("flood.py", flood)
        assert box.commands.run("python3 flood.py").stdout.count("\n") == 16
        assert box.commands.run(f"for i in $(seq 30); do {HEALTH} && break; sleep 0.1; done").stdout.endswith("200")
