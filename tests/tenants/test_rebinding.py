"""A web page whose name resolves to this machine: without keys, nothing but its name tells it from a local program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.conftest import serving, with_template
from tests.tenants.routes import WEBSOCKET, Known
from tests.tenants.wire import Wire

from cloche.model import Template

PUBLIC = re.compile(r"/(health|ready|openapi\.json|ui/login(/state)?|ui/static/.*)$")
PREFIXES = {"opensandbox": "/opensandbox/v1", "librechat": "/librechat/v1", "e2b": "/e2b"}


@pytest.mark.parametrize("name", ["evil.example", pytest.param("127.0.0.1.evil.example", marks=pytest.mark.long)])
def test_a_rebound_name_reaches_no_route_without_keys(
    routes: list[Known], template: Template, tmp_path: Path, name: str
):
    with serving(
        with_template(tmp_path / "data", template), "--insecure-no-auth", env={"CLOCHE_API_KEY": ""}
    ) as server:
        wire = Wire(server.url)
        host = f"{name}:{server.url.rpartition(':')[2]}"
        let_in = []
        for route in routes:
            path = PREFIXES.get(route.plane, "") + re.sub(r"\{.*?\}", "x1", route.path)
            if route.method == WEBSOCKET or PUBLIC.search(path):
                continue
            body = None if route.method == "GET" else {}
            answer = wire.ask(route.method, path, body, {"host": host, "origin": f"http://{host}"})
            if answer.status < 300:
                let_in.append((route.name, answer.status, answer.text[:100]))
        assert not let_in
        assert wire.ask("GET", "/api/v1/sandboxes").status == 200  # as a local program
        wire.close()
