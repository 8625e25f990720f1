"""What a sandbox may reach, asked for with E2B's SDKs. What it reaches are real servers that the operator named."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import httpx
import pytest
from e2b import ALL_TRAFFIC, CommandExitException, SandboxException, SandboxNotFoundException
from e2b_code_interpreter import AsyncSandbox, Sandbox
from tests import javascript
from tests.conftest import RunningServer, serving
from tests.network.far_server import own_trust

from cloche.engine.sandboxes.network import network_environment
from cloche.network_policy import NetworkPolicy

ONE, TWO = "127.0.0.11", "127.0.0.12"
NAMES = ("one.test", "two.test", "one.sub.test", "two.sub.test")


class Answering(http.server.BaseHTTPRequestHandler):
    """Says under which name it was asked, and remembers with which key."""

    keys: ClassVar[dict[str, str | None]] = {}  # by path

    def do_GET(self) -> None:
        self.keys[self.path] = self.headers["x-key"]
        body = json.dumps({"host": self.headers["host"], "key": self.headers["x-key"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Far(NamedTuple):
    """Servers that answer at every address of this host's loopback, by every name that the operator knows."""

    port: int
    tls_port: int
    bundle: Path  # whom to trust

    def url(self, host: str) -> str:
        return f"http://{host}:{self.port}/"

    def tls_url(self, host: str, path: str) -> str:
        return f"https://{host}:{self.tls_port}{path}"


@pytest.fixture(scope="module")
def far(tmp_path_factory) -> Iterator[Far]:
    trust = own_trust(tmp_path_factory.mktemp("trust"), list(NAMES))
    plain = http.server.ThreadingHTTPServer(("0.0.0.0", 0), Answering)
    tls = http.server.ThreadingHTTPServer(("0.0.0.0", 0), Answering)
    tls.socket = trust.server.wrap_socket(tls.socket, server_side=True)
    for server in (plain, tls):
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield Far(plain.server_port, tls.server_port, trust.bundle)
    for server in (plain, tls):
        server.shutdown()
        server.server_close()


def configured(path: Path, *allow: str) -> str:
    hosts = "\n".join(f'"{name}" = "{ONE if name.startswith("one") else TWO}"' for name in NAMES)
    path.write_text(f'[network]\nallow = {json.dumps(allow)}\ninternal = ["127.0.0.8/29"]\n[network.hosts]\n{hosts}\n')
    return str(path)


@pytest.fixture(scope="module")
def generous(bare_dir, far, tmp_path_factory) -> Iterator[RunningServer]:
    config = configured(tmp_path_factory.mktemp("generous") / "cloche.toml", "*:*")
    with serving(bare_dir, env={"CLOCHE_CONFIG": config, "SSL_CERT_FILE": str(far.bundle)}) as running:
        yield running


@pytest.fixture(scope="module")
def sparing(bare_dir, far, tmp_path_factory) -> Iterator[RunningServer]:
    """An operator who allows one name and what is below another."""
    config = configured(tmp_path_factory.mktemp("sparing") / "cloche.toml", "one.test:*", "*.sub.test:*")
    with serving(bare_dir, env={"CLOCHE_CONFIG": config, "SSL_CERT_FILE": str(far.bundle)}) as running:
        yield running


@pytest.fixture
def create(generous):
    """Makes sandboxes of the generous operator, and ends them."""
    made = []

    def creating(**asked: object) -> Sandbox:
        made.append(Sandbox.create(**{**generous.e2b, **asked}))
        return made[-1]

    yield creating
    for box in made:
        box.kill()


def asking(url: str, prefix: str = "") -> str:
    return f"{prefix}curl -sSpf --max-time 20 {url}"


def get(box: Sandbox, url: str, prefix: str = "") -> dict[str, str]:
    return json.loads(box.commands.run(asking(url, prefix)).stdout)


def refused(box: Sandbox, url: str) -> str:
    """What curl says about it."""
    with pytest.raises(CommandExitException) as failed:
        box.commands.run(asking(url))
    return failed.value.stderr


# -- when it is made


def test_the_internet_is_there_by_default_where_the_operator_allows_it(far, create):
    box = create()
    assert get(box, far.url("one.test"))["host"] == f"one.test:{far.port}"
    assert get(box, far.url(TWO))["host"] == f"{TWO}:{far.port}"
    info = box.get_info()
    assert info.allow_internet_access is True
    assert info.network == {"allow_public_traffic": True}


def test_code_and_sudo_reach_it_as_commands_do(far, create):
    box, url = create(allow_internet_access=True), far.url("two.test")
    read = box.run_code(f"import urllib.request; urllib.request.urlopen({url!r}).status")
    assert read.text == "200"
    root = box.commands.run("sudo env").stdout.splitlines()
    assert {f"{name}={value}" for name, value in network_environment(NetworkPolicy(allow=("*",))).items()} <= set(root)
    assert get(box, url, prefix="sudo ")["host"] == f"two.test:{far.port}"
    assert get(box, url, prefix="sudo -u user ")["host"] == f"two.test:{far.port}"


def test_it_can_be_declined(far, create):
    box = create(allow_internet_access=False)
    refused(box, far.url("one.test"))
    refused(box, far.url(ONE))
    info = box.get_info()
    assert info.allow_internet_access is False
    assert info.network == {"allow_public_traffic": True, "deny_out": [ALL_TRAFFIC]}


def test_allow_rules_come_before_deny_rules(far, create):
    box = create(network={"deny_out": lambda context: [context.all_traffic], "allow_out": [ONE, "*.sub.test"]})
    assert get(box, far.url(ONE)) and get(box, far.url("two.sub.test"))
    assert "403" in refused(box, far.url(TWO))
    assert "403" in refused(box, far.url("one.test"))
    assert box.get_info().network == {
        "allow_public_traffic": True,
        "allow_out": [ONE, "*.sub.test"],
        "deny_out": [ALL_TRAFFIC],
    }


def test_an_address_that_is_denied_is_denied_by_name_too(far, create):
    box = create(network={"deny_out": [f"{TWO}/32"]})
    assert get(box, far.url(ONE)) and get(box, far.url("one.test"))
    assert "403" in refused(box, far.url(TWO))
    assert "403" in refused(box, far.url("two.test"))


def test_an_address_that_is_allowed_within_a_denied_network_is_allowed_by_name_too(far, create):
    box = create(network={"deny_out": ["127.0.0.0/8"], "allow_out": [ONE]})
    assert get(box, far.url(ONE)) and get(box, far.url("one.test"))
    assert "403" in refused(box, far.url(TWO))
    assert "403" in refused(box, far.url("two.test"))


@pytest.mark.parametrize(
    ("network", "says"),
    [
        ({"allow_out": ["one.test"]}, "400: When specifying allowed domains in allow out, you must include"),
        ({"deny_out": ["one.test"]}, "400: invalid denied CIDR one.test"),
        ({"dns_servers": ["1.1.1.1"]}, r"501: network\.dnsServers is not possible"),
    ],
)
def test_an_invalid_network_creates_no_sandbox(generous, network, says):
    with pytest.raises(SandboxException, match=says):
        Sandbox.create(network=network, **generous.e2b)


# -- while it runs


def test_a_running_network_can_be_changed_and_omitted_fields_are_cleared(far, create):
    box, one, two = create(), far.url(ONE), far.url("two.test")
    assert get(box, one) and get(box, two)
    box.update_network({"deny_out": [TWO]})
    assert get(box, one)
    assert "403" in refused(box, two)
    box.update_network({"deny_out": [ALL_TRAFFIC], "allow_out": ["two.test"]})
    assert get(box, two)
    assert "403" in refused(box, one)
    box.update_network({})
    assert get(box, one) and get(box, two)


def test_a_sandbox_without_a_network_can_be_given_one_and_lose_it(far, create):
    box, url = create(allow_internet_access=False), far.url("one.test")
    reading = f"import urllib.request; urllib.request.build_opener().open({url!r}).status"
    assert box.run_code(reading).error is not None
    box.update_network({"allow_internet_access": True})
    assert get(box, url)
    assert box.run_code(reading).text == "200"  # the kernel that runs already
    box.update_network({"allow_internet_access": False})
    assert "403" in refused(box, url)
    assert box.get_info().allow_internet_access is False


def test_a_change_that_is_refused_changes_nothing(far, create):
    box = create(network={"deny_out": [TWO]})
    with pytest.raises(SandboxException, match=r"400: invalid denied CIDR two\.test"):
        box.update_network({"deny_out": ["two.test"]})
    assert box.get_info().network["deny_out"] == [TWO]
    assert "403" in refused(box, far.url(TWO))


def test_the_network_of_a_sandbox_that_is_gone_cannot_be_changed(create, generous):
    box = create()
    box.kill()
    with pytest.raises(SandboxNotFoundException):
        box.update_network({})
    api = {"X-API-Key": generous.key}
    answer = httpx.put(f"{generous.url}/e2b/sandboxes/{box.sandbox_id}/network", headers=api, json={})
    assert (answer.status_code, answer.json()["code"]) == (404, 404)


async def test_the_async_client_does_the_same(generous, far):
    box = await AsyncSandbox.create(
        network={"allow_out": ["one.test"], "deny_out": lambda context: [context.all_traffic]}, **generous.e2b
    )
    try:
        assert (await box.commands.run(asking(far.url("one.test")))).exit_code == 0
        await box.update_network({"deny_out": [ONE]})
        with pytest.raises(CommandExitException):
            await box.commands.run(asking(far.url("one.test")))
        assert (await box.get_info()).network["deny_out"] == [ONE]
    finally:
        await box.kill()


def test_the_javascript_client_does_the_same(generous, far):
    javascript.install()
    urls = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL"), f"{generous.url}/e2b")
    javascript.run(
        ["node", "--test", "network.mjs"],
        E2B_API_KEY=generous.key,
        **urls,
        ONE=far.url("one.test"),
        OTHER=far.url(TWO),
    )


# -- headers that are added on the way


RULES = {"two.test": [{"transform": {"headers": {"X-Key": "hush-hush"}}}]}


def test_a_rules_headers_are_never_shown(create):
    box = create(network={"rules": RULES})
    assert box.get_info().network["rules"] == {"two.test": [{"transform": {"headers": {"X-Key": "***"}}}]}
    with pytest.raises(SandboxException, match="send the value itself"):
        box.update_network({"rules": box.get_info().network["rules"]})


def test_a_rules_headers_are_added_on_the_way_out_and_are_nowhere_inside(far, create):
    box = create(network={"rules": RULES, "allow_out": ["two.test", "one.test"], "deny_out": [ALL_TRAFFIC]})
    for client, prefix in (("curl", ""), ("sudo", "sudo ")):
        get(box, far.tls_url("two.test", f"/rule-{client}"), prefix)
        assert Answering.keys[f"/rule-{client}"] == "hush-hush"
    get(box, far.tls_url("one.test", "/no-rule"))
    assert Answering.keys["/no-rule"] is None
    assert "hush" not in box.commands.run("env; sudo env").stdout


def test_rules_can_be_changed_while_it_runs(far, create):
    box = create()
    get(box, far.tls_url("two.test", "/before"))
    box.update_network({"rules": RULES})
    get(box, far.tls_url("two.test", "/during"))
    box.update_network({})
    get(box, far.tls_url("two.test", "/after"))
    assert [Answering.keys[path] for path in ("/before", "/during", "/after")] == [None, "hush-hush", None]


def test_a_rule_alone_opens_nothing(far, create):
    box = create(network={"rules": RULES, "deny_out": [ALL_TRAFFIC]})
    refused(box, far.url("two.test"))


# -- the operator's word


def test_without_the_operators_leave_the_internet_may_be_asked_for_and_is_not_there(server):
    for asked in ({}, {"allow_internet_access": True}, {"network": {"allow_out": [ALL_TRAFFIC]}}):
        box = Sandbox.create(**asked, **server.e2b)
        info = box.get_info()
        assert info.allow_internet_access is False
        assert info.network == {"allow_public_traffic": True, "deny_out": [ALL_TRAFFIC]}
        assert box.commands.run("env | grep -ci proxy || true").stdout == "0\n"
        box.update_network({"deny_out": ["8.8.8.8"]})
        box.kill()


def test_without_the_operators_leave_nothing_can_be_asked_for_by_name(server, box):
    network = {"allow_out": ["pypi.org"], "deny_out": [ALL_TRAFFIC]}
    with pytest.raises(SandboxException, match=r"400: sandboxes of this host have no network but loopback.*allow"):
        Sandbox.create(network=network, **server.e2b)
    with pytest.raises(SandboxException, match="400: sandboxes of this host have no network"):
        box.update_network(network)
    with pytest.raises(SandboxException, match="400: sandboxes of this host have no network"):
        box.update_network({"rules": RULES})


def test_the_internet_is_no_more_than_the_operator_allows(sparing, far):
    box = Sandbox.create(allow_internet_access=True, **sparing.e2b)
    assert get(box, far.url("one.test")) and get(box, far.url("two.sub.test"))
    assert "403" in refused(box, far.url("two.test"))
    assert "403" in refused(box, far.url(ONE))
    info = box.get_info()
    assert info.allow_internet_access is False
    assert info.network["allow_out"] == ["one.test", "*.sub.test"]
    box.kill()


def test_hosts_outside_the_operators_rules_are_refused_by_name(sparing, far):
    network = {"allow_out": ["one.test", "two.test"], "deny_out": [ALL_TRAFFIC]}
    with pytest.raises(SandboxException, match=r"400: the operator of this host allows no sandbox to reach two\.test"):
        Sandbox.create(network=network, **sparing.e2b)
    with pytest.raises(SandboxException, match=r"400: the operator of this host allows no sandbox to reach two\.test"):
        Sandbox.create(network={"rules": RULES}, **sparing.e2b)
    box = Sandbox.create(network={**network, "allow_out": ["one.test"]}, **sparing.e2b)
    assert get(box, far.url("one.test"))
    refused(box, far.url("two.sub.test"))
    box.kill()


# -- what comes in


def test_a_program_is_told_the_host_that_was_asked_for(server):
    mask = "custom-host.example.com:${PORT}"
    box = Sandbox.create(network={"mask_request_host": mask}, **server.e2b)
    serve = """
import http.server, threading
class Told(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        told = f"{self.headers['host']} {self.headers['x-forwarded-host']}".encode()
        self.send_response(200), self.send_header("Content-Length", str(len(told))), self.end_headers()
        self.wfile.write(told)
threading.Thread(target=http.server.HTTPServer(("127.0.0.1", 3000), Told).serve_forever, daemon=True).start()
"""
    assert box.run_code(serve).error is None
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "3000"}
    told = httpx.get(f"{server.url}/e2b/", headers=headers).text
    assert told == f"custom-host.example.com:3000 {server.url.removeprefix('http://')}"
    assert box.get_info().network["mask_request_host"] == mask
    box.kill()
