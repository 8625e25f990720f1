"""`cloche serve`: how it starts, what it says and logs, and how it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest
from e2b_code_interpreter import Sandbox
from tests.conftest import RunningServer, serving, wait_until

from cloche.cli import serve
from cloche.cli.hosting import silence_uvicorn
from cloche.config import load_config
from cloche.linux import cpu_priority
from cloche.linux.cgroups.files import HOST_LEAF, mounted_hierarchies
from cloche.store.keys import server_secret
from cloche.telemetry import log

SECRET_CODE = "never_log_this = 6*7; print(never_log_this)"
SECRET_FILE = "/home/user/never-log-this-name.txt"


def refusal(*options: str, env: dict[str, str] | None = None) -> str:
    """What the server says when it does not start."""
    command = [Path(sys.executable).with_name("cloche"), "--data-dir", "/nonexistent/never/made", "serve", *options]
    ended = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (125, "")
    assert not Path("/nonexistent").exists()  # it had done nothing yet
    return ended.stderr


def descendants(pid: int) -> set[int]:
    """The processes below that one."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | descendants(child)
    return found


def is_alive(pid: int) -> bool:
    """A zombie is dead; when its new parent looks at it is not our affair."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- what does not start, and says why


def test_no_keys_and_a_network_do_not_go_together():
    assert "--insecure-no-auth" in refusal("--insecure-no-auth", "--host", "0.0.0.0")


def test_a_port_that_is_taken_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refusal("--port", str(port))


def test_half_of_tls_or_nonsense_for_a_certificate_is_said(tmp_path):
    assert "tls_key" in refusal("--tls-cert", "x.pem")
    (tmp_path / "x.pem").write_text("no certificate")
    assert "tls_cert" in refusal("--tls-cert", str(tmp_path / "x.pem"), "--tls-key", str(tmp_path / "x.pem"))


def test_a_key_that_could_be_guessed_is_refused_and_not_repeated():
    said = refusal(env={"CLOCHE_API_KEY": "hunter2"})
    assert "CLOCHE_API_KEY" in said and "hunter2" not in said


def test_flags_are_keys_of_the_configuration():
    config = load_config(environ={}, flags={"data_dir": "/x", "server.port": 0, "server.host": "::1"})
    assert (config.server.port, config.origins["server.host"]) == (0, "flag --host")


# --- what it says about requests


@pytest.fixture(scope="module")
def logged(bare_dir, tmp_path_factory):
    """A server after a few requests, and what it logged of them as JSON."""
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(bare_dir, log=log) as server:
        box = Sandbox.create(**server.e2b)
        box.run_code(SECRET_CODE)
        box.files.write(SECRET_FILE, "never log these contents")
        box.kill()
        own = {"x-request-id": "my-own-id", "x-api-key": server.key}
        answers = [
            httpx2.get(f"{server.url}/health?never=logged"),
            httpx2.get(f"{server.url}/admin/keys", headers=own),
            httpx2.get(f"{server.url}/admin/keys/never-logged", headers={**own, "x-request-id": "a" * 200}),
            httpx2.get(f"{server.url}/never-logged"),
            httpx2.get(f"{server.url}/e2b/never-logged"),
        ]
        last = answers[-1].headers["x-request-id"]
        wait_until(lambda: last in log.read_text())  # a request is logged once it is answered
        yield server, answers, log.read_text()


def test_every_answer_has_an_id_and_a_clients_own_is_kept(logged):
    _, answers, _ = logged
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids[1] == "my-own-id"
    assert all(re.fullmatch("req_[0-9a-f]{16}", id) for id in ids[:1] + ids[2:])
    assert len(set(ids)) == len(ids)


def test_every_request_is_logged_by_its_route_with_its_id(logged):
    _, answers, log = logged
    for answer, route in zip(answers, ("/health", "/admin/keys", "/admin/keys/{id}", "-", "-"), strict=True):
        (line,) = [line for line in log.splitlines() if answer.headers["x-request-id"] in line]
        assert f"route={route} " in line + " " and f"status={answer.status_code}" in line and " ms=" in line
    assert re.search(r"method=POST route=/execute status=200 .* dialect=e2b", log)
    assert "key_id=CLOCHE_API_KEY" in log


def test_neither_code_nor_output_nor_names_nor_keys_are_logged(logged):
    server, _, log = logged
    assert "never" not in log.lower()
    assert server.key not in log and server.key[4:] not in log


def test_there_is_no_page_outside_of_the_prefixes(logged):
    _, answers, _ = logged
    assert [answer.status_code for answer in answers] == [200, 200, 405, 404, 404]


def test_unknown_routes_answer_in_our_shape(server):
    own = {"x-api-key": server.key}
    for method, path, status, code in (
        ("GET", "/admin/nope", 404, "not_found"),
        ("PUT", "/admin/keys", 405, "invalid_request"),
        ("POST", "/health", 405, "invalid_request"),
        ("GET", "/metrics/", 404, "not_found"),
        ("GET", "/nope", 404, "not_found"),
    ):
        answer = httpx2.request(method, server.url + path, headers=own)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_uvicorns_errors_are_logged_as_they_read():
    silence_uvicorn()
    logging.getLogger("uvicorn.error").error("a %s of uvicorn's", "fault")
    assert "a fault of uvicorn's" in log.recent[-1].fields["what"]


# --- TLS, and a server on a network


@pytest.fixture
def certificate(tmp_path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    try:
        subprocess.run([*made, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    return cert, key


def test_a_server_on_a_network_speaks_tls_and_counts_for_admins_only(certificate, own_data_dir, tmp_path):
    cert, key = certificate
    options = ("--host", "0.0.0.0", "--tls-cert", str(cert), "--tls-key", str(key))
    with serving(own_data_dir, *options, log=tmp_path / "log") as server:
        assert server.url.startswith("https://0.0.0.0:")
        url = server.url.replace("0.0.0.0", "localhost")
        context = ssl.create_default_context(cafile=str(cert))
        with httpx2.Client(verify=context, base_url=url) as client:
            assert client.get("/health").json()["status"] == "ok"
            assert client.get("/metrics").status_code == 401
            user = client.post("/admin/keys", json={"owner": "alice"}, headers={"x-api-key": server.key}).json()["key"]
            assert client.get("/metrics", headers={"x-api-key": user}).status_code == 403
            counted = client.get("/metrics", headers={"authorization": f"Bearer {server.key}"})
            assert counted.status_code == 200 and "alice" not in counted.text
        assert "without TLS" not in (tmp_path / "log").read_text()


# --- before whom it runs


@pytest.mark.skipif(
    cpu_priority.find_server_group(mounted_hierarchies()) is None, reason="needs a CPU group that we may make others in"
)
def test_the_server_runs_before_the_code_that_it_serves(server):
    def in_the_leaf(pid: int) -> bool:
        try:
            return f"/{HOST_LEAF}\n" in Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            return False  # it has ended

    with Sandbox.create(**server.e2b) as box:
        box.run_code("1")
        assert in_the_leaf(server.process.pid)
        wait_until(lambda: not any(map(in_the_leaf, descendants(server.process.pid))))  # one may just be started


# --- the control socket, and the end


def instance_of(data_dir: Path) -> Path:
    (instance,) = (each for each in (data_dir / "run").iterdir() if each.name[0] != ".")
    return instance


def running_cell(server: RunningServer) -> tuple[threading.Thread, list[BaseException | object]]:
    """A cell that has begun and would take long, and what its client will get."""
    box, begun = Sandbox.create(**server.e2b), threading.Event()
    got: list[BaseException | object] = []

    def run() -> None:
        try:
            code = "print('begun')\nimport time\ntime.sleep(600)"
            got.append(box.run_code(code, on_stdout=lambda _: begun.set(), timeout=600))
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    return thread, got


def test_sigterm_ends_all_sandboxes_and_leaves_nothing(own_data_dir):
    with serving(own_data_dir) as server:
        instance = instance_of(own_data_dir)
        control = instance / "control.sock"
        assert stat.S_ISSOCK(control.stat().st_mode) and stat.S_IMODE(control.stat().st_mode) == 0o600
        assert stat.S_IMODE(instance.stat().st_mode) == 0o700
        assert stat.S_IMODE((own_data_dir / "secret").stat().st_mode) == 0o600
        client, got = running_cell(server)
        processes = descendants(server.process.pid)
        assert processes

        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        client.join(30)
        assert not client.is_alive() and got  # nobody waits for an answer that cannot come
        assert not instance.exists()
        wait_until(lambda: not any(map(is_alive, processes)))


def test_tokens_of_sandboxes_survive_a_restart(own_data_dir):
    """What is derived from the secret must not change, else old signed URLs and clients fail for no reason."""
    first = server_secret(own_data_dir / "secret")
    assert server_secret(own_data_dir / "secret") == first
    assert len(first) == 32


def test_log_lines_can_be_json(own_data_dir, tmp_path):
    """Each line is an object with an event, for whoever collects logs."""
    command = [Path(sys.executable).with_name("cloche"), "--log", "json", "serve", "--port", "0"]
    env = {**os.environ, "CLOCHE_DATA_DIR": str(own_data_dir), "CLOCHE_API_KEY": "e2b_" + "1" * 40}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("data directory ")
        assert process.stdout.readline().startswith("ready ")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
    events = [json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines()]
    assert "server.ready" in events and "server.stopping" in events


def test_a_watch_that_ends_by_itself_is_in_the_log():
    """Else nobody would know that keys and quotas are as they were for ever."""

    async def broken() -> None:
        raise OSError("a mistake of ours")

    async def watch() -> None:
        await asyncio.wait([serve.create_watched_task("refresh", broken())])

    asyncio.run(watch())
    last = log.recent[-1]
    assert last.event == "server.watch_ended" and "a mistake of ours" in last.fields["error"]
