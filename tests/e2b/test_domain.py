"""Sandboxes by name: the domain in responses, `get_host()`, and clients that know a domain only."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from e2b_code_interpreter import Sandbox
from tests import javascript
from tests.conftest import REPOSITORY, RunningServer
from tests.secure_server import SecureServer, serving_by_domain

from cloche.api.e2b.port_target import NO_DOMAIN, sandbox_domain

OLD_PYTHON = REPOSITORY / ".venv-agents" / "bin" / "python"  # e2b 2.31.0, e2b-code-interpreter 2.8.1


@pytest.mark.parametrize(
    ("host", "domain"),
    [
        ("127.0.0.1:8000", "localhost:8000"),
        ("127.0.0.1", "localhost"),
        ("[::1]:8000", "localhost:8000"),
        ("localhost:8000", "localhost:8000"),
        ("Cloche.Example.org", "cloche.example.org"),
        ("10.0.0.5:8000", NO_DOMAIN),
        ("[2001:db8::1]:8000", NO_DOMAIN),
        ("", NO_DOMAIN),
        ("evil.example/x?", "evil.example"),
        ("a b", NO_DOMAIN),
        ("x:port", NO_DOMAIN),
        ("[", NO_DOMAIN),
    ],
)
def test_without_a_configured_domain_it_is_the_address_that_the_client_uses(host: str, domain: str):
    assert sandbox_domain("", "", host) == domain


def test_a_configured_domain_and_a_public_address_come_first():
    assert sandbox_domain("boxes.test:8443", "https://public.test", "127.0.0.1") == "boxes.test:8443"
    assert sandbox_domain("", "https://public.test/", "127.0.0.1") == "public.test"
    assert sandbox_domain("", "http://127.0.0.1:9000", "x.test") == "localhost:9000"


def test_every_response_about_a_sandbox_names_a_domain_of_the_server(server: RunningServer):
    """Else clients take E2B's own, and send code and tokens there."""
    here = f"localhost:{urlsplit(server.url).port}"
    with httpx.Client(base_url=f"{server.url}/e2b", headers={"X-API-Key": server.key}, timeout=60) as api:
        made = api.post("/sandboxes", json={"templateID": "base", "secure": True}).json()
        path = f"/sandboxes/{made['sandboxID']}"
        forks = api.post(f"{path}/fork", json={}).json()
        api.post(f"{path}/pause", json={})
        resumed = api.post(f"{path}/resume", json={"timeout": 60}).json()
        connected = api.post(f"{path}/connect", json={"timeout": 60}).json()
        told = [made, forks[0]["sandbox"], resumed, connected, api.get(path).json()]
        assert [each["domain"] for each in told] == [here] * 5
        for each in (made, forks[0]["sandbox"]):
            api.delete(f"/sandboxes/{each['sandboxID']}")


@pytest.mark.skipif(
    shutil.which("curl") is None, reason="there is no curl, which resolves names below localhost itself"
)
def test_get_host_is_a_name_that_reaches_the_port_on_one_machine(server: RunningServer):
    with Sandbox.create(**server.e2b) as box:
        box.files.write("/workspace/index.html", "page")
        box.commands.run("python3 -m http.server 3000 --directory /workspace", background=True)
        box.commands.run("for n in $(seq 200); do curl -sf localhost:3000 && exit; sleep 0.05; done; exit 1")
        host = box.get_host(3000)
        assert host == f"3000-{box.sandbox_id}.localhost:{urlsplit(server.url).port}"
        page = subprocess.run(["curl", "-s", "--noproxy", "*", f"http://{host}/"], capture_output=True, text=True)
        assert page.stdout == "page"


# -- by a domain with a certificate


@pytest.fixture(scope="module")
def secure_server(bare_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    with serving_by_domain(bare_dir, tmp_path_factory.mktemp("tls")) as server:
        yield server


@pytest.mark.parametrize("python", [sys.executable, str(OLD_PYTHON)], ids=["newest", "reads no E2B_SANDBOX_URL"])
def test_clients_work_by_a_domain_alone(secure_server: SecureServer, python: str):
    if not Path(python).exists():
        pytest.skip("old clients have an environment of their own: make agents-env")
    program = REPOSITORY / "tests" / "e2b" / "domain_client.py"
    done = subprocess.run(
        [python, str(program)], env=secure_server.environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    check_client_output(done.stdout, secure_server)


def test_the_javascript_client_works_by_a_domain_alone(secure_server: SecureServer):
    javascript.install()
    command = ["node", "--import", "./localhost_names.mjs", "domain_client.mjs"]
    environ = {name: secure_server.environ[name] for name in ("E2B_API_KEY", "E2B_DOMAIN")}
    check_client_output(javascript.run(command, NODE_EXTRA_CA_CERTS=str(secure_server.cert), **environ), secure_server)


def check_client_output(output: str, server: SecureServer) -> None:
    said = json.loads(output.splitlines()[-1])
    host = f"3000-{said.pop('id')}.{server.domain}"
    assert said == {
        "text": "42",
        "context": "of the context",
        "file": "page",
        "command": "user\n",
        "host": host,
        "page": "page",
        "killed": True,
    }
