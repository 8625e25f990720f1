"""A real web server on loopback, which remembers what it was asked, for tests of what sandboxes reach."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Site:
    """`seen` has the headers of all requests, by their names in lower case."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.seen: list[dict[str, str]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.seen.append({name.lower(): value for name, value in self.headers.items()})
                self.send_response(200)
                self.send_header("content-length", "5")
                self.end_headers()
                self.wfile.write(b"hello")

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = int(self.server.server_address[1])

    def at(self, name: str) -> str:
        """It has no name of its own: whoever resolves names decides which lead to it."""
        return f"{name}:{self.port}"


@contextmanager
def web_site(tls: ssl.SSLContext | None = None) -> Iterator[Site]:
    site = Site(tls)
    thread = threading.Thread(target=site.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.server.shutdown()
        site.server.server_close()
        thread.join()


def fetch(*places: str, scheme: str = "http", headers: str = "{}") -> str:
    """Code that says for each place what became of a request. `headers` is an expression in that code."""
    return f"""\
import os, urllib.request, urllib.error
for place in {list(places)!r}:
    try:
        request = urllib.request.Request("{scheme}://" + place + "/", headers={headers})
        print(urllib.request.urlopen(request, timeout=20).read().decode())
    except urllib.error.HTTPError as error:
        print("refused", error.code)
    except OSError as error:
        print("unreachable")
"""
