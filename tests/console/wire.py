"""The console without a browser: requests as somebody could write them, byte for byte."""

from __future__ import annotations

import http.client
import json
import re
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlencode, urlsplit

from tests.conftest import RunningServer
from tests.tenants.routes import Known
from tests.tenants.wire import SECONDS, Answer
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

HTML = {"accept": "text/html,*/*"}
CSRF = "x-cloche-csrf"


class Stranger:
    """Somebody without a session, who asks from that address."""

    def __init__(self, server: RunningServer, address: str = "127.0.0.1"):
        self.place = urlsplit(server.url).netloc
        self.origin = server.url
        self._from = (address, 0)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """`body`: bytes as they are, anything else as JSON. Headers that are said twice have a line for each."""
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("content-type", "application/json")
        connection = http.client.HTTPConnection(self.place, timeout=SECONDS, source_address=self._from)
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return Answer(answer.status, tuple((k.lower(), v) for k, v in answer.getheaders()), answer.read())
        finally:
            connection.close()

    def open(self, path: str, headers: dict[str, str] | None = None) -> int:
        """The status with which a WebSocket is answered."""
        try:
            uri, sent = f"ws://{self.place}{path}", headers or {}
            with connect(uri, additional_headers=sent, open_timeout=SECONDS, close_timeout=1):
                return 101
        except InvalidStatus as refused:
            return refused.response.status_code

    def send(self, path: str, fields: dict[str, str], headers: dict[str, str] | None = None) -> Answer:
        """A form, as a page of ours sends it."""
        form = {"content-type": "application/x-www-form-urlencoded", "origin": self.origin}
        return self.ask("POST", path, urlencode(fields).encode(), {**form, **HTML, **(headers or {})})


class Insider(Stranger):
    """Somebody who has logged in with that key."""

    def __init__(self, server: RunningServer, key: str | None = None):
        super().__init__(server)
        entered = self.send("/ui/login", {"key": key or server.key})
        assert entered.status == 303, entered
        self.cookie = entered.header("set-cookie").partition(";")[0]
        self.csrf = csrf_of(self.page("/"))

    def page(self, path: str) -> Answer:
        return self.ask("GET", f"/ui{path}", headers={**HTML, "cookie": self.cookie})

    def say(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """As a script of a page does, but for these headers."""
        own = {"cookie": self.cookie, CSRF: self.csrf, "origin": self.origin}
        return self.ask(method, f"/ui{path}", body, {**own, **{k.replace("_", "-"): v for k, v in headers.items()}})

    def cut_short(self, path: str, body: Any, begun: Event) -> bool:
        """Follows what is streamed, and sets that once something came. Whether it broke off before its end."""
        connection = http.client.HTTPConnection(self.place, timeout=SECONDS * 3)
        sent = {"cookie": self.cookie, CSRF: self.csrf, "origin": self.origin, "content-type": "application/json"}
        connection.request("POST", f"/ui{path}", json.dumps(body).encode(), sent)
        answer, ended = connection.getresponse(), False
        while line := answer.readline():
            ended = ended or b'"ended"' in line
            if b"begun" in line:
                begun.set()
        connection.close()
        return not ended


def csrf_of(page: Answer) -> str:
    return re.findall('name="csrf" content="([^"]*)"', page.text)[0]


def new_key(server: RunningServer, owner: str, role: str = "user", **more: Any) -> dict[str, Any]:
    """A key of that owner, with its record."""
    asked = {"owner": owner, "role": role, **more}
    made = Stranger(server).ask("POST", "/admin/keys", asked, {"x-api-key": server.key})
    assert made.status == 201, made
    told: dict[str, Any] = made.json()
    return told


def data_dir_of(server: RunningServer) -> Path:
    """Where it keeps its things: as its own environment says it."""
    environ = Path(f"/proc/{server.process.pid}/environ").read_bytes().decode().split("\0")
    return Path(next(each.partition("=")[2] for each in environ if each.startswith("CLOCHE_DATA_DIR=")))


def path_of(route: Known) -> str:
    """Where it is reached at the console, with something for each parameter."""
    path = re.sub(r"(?<=/)\{\w+(:\w+)?\}", "ghost", route.path).replace("{rest:path}", "/ghost")
    return path if route.plane == "ui" else f"/ui{path}"
