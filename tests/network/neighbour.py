"""A real HTTP server on loopback under names of the test configuration, for tests of who may say what is reached."""

from __future__ import annotations

import http.server
import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.network.far_server import own_trust

from cloche.config.sections import NetworkConfig

ADDRESS = "127.0.0.77"
NAMES = ("api.test", "www.api.test", "other.test")


class Neighbour(NamedTuple):
    port: int
    tls_port: int
    bundle: str  # whom to trust, to believe what it says over TLS
    seen: list[dict[str, str]]  # the headers of each request over TLS

    def at(self, name: str) -> str:
        """A pattern of rules."""
        return f"{name}:{self.port}"

    def url(self, name: str) -> str:
        return f"http://{name}:{self.port}/"

    def fetch(self, name: str) -> str:
        """A program that prints what the server answered, or that it could not be reached."""
        return (
            "import urllib.error, urllib.request\n"
            f"try: print(urllib.request.urlopen({self.url(name)!r}, timeout=30).read().decode(), end='')\n"
            "except urllib.error.URLError: print('refused', end='')\n"
        )

    def settings(self, *allow: str, deny: tuple[str, ...] = (), default: tuple[str, ...] = ()) -> NetworkConfig:
        """What an operator sets who lets sandboxes reach it."""
        hosts = dict.fromkeys(NAMES, ADDRESS)
        return NetworkConfig(allow=allow, deny=deny, default=default, internal=(ADDRESS,), hosts=hosts)

    def variables(self, *allow: str, deny: tuple[str, ...] = (), default: tuple[str, ...] = ()) -> dict[str, str]:
        """The same for a process."""
        return {
            "CLOCHE_NETWORK_ALLOW": ",".join(allow),
            "CLOCHE_NETWORK_DENY": ",".join(deny),
            "CLOCHE_NETWORK_DEFAULT": ",".join(default),
            "CLOCHE_NETWORK_INTERNAL": ADDRESS,
            "CLOCHE_NETWORK_HOSTS": " ".join(f"{name}={ADDRESS}" for name in NAMES),
            "SSL_CERT_FILE": self.bundle,
        }


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """`/` says hello, `/headers` the headers that came."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append(headers)  # type: ignore[attr-defined]
        body = json.dumps(headers) if self.path == "/headers" else "hello"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def living_next_door() -> Iterator[Neighbour]:
    with tempfile.TemporaryDirectory() as directory, _serving() as plain, _serving() as secure:
        trust = own_trust(Path(directory), list(NAMES))
        secure.socket = trust.server.wrap_socket(secure.socket, server_side=True)
        yield Neighbour(plain.server_port, secure.server_port, str(trust.bundle), secure.seen)  # type: ignore[attr-defined]


@contextmanager
def _serving() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer((ADDRESS, 0), _Page) as server:
        server.seen = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
