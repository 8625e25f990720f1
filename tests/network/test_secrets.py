"""Secrets that programs in real sandboxes use, against a real server that speaks TLS, and that are nowhere inside.

(Sandboxes have no snapshots yet: there is nothing of that kind to look into.)
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from tests.conftest import serving, with_template
from tests.network.carried import httpx_archive
from tests.network.far_server import ADDRESS, FarServer, own_trust
from tests.network.memory import found_in_memory, shapes

import cloche
from cloche import errors
from cloche.config import Config
from cloche.config.sections import NetworkConfig
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.network import PROXY_ENV, TRUST_ENV
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import fold
from cloche.model import Limits, SandboxSpec, Template
from cloche.network_policy import NetworkPolicy, Secret
from cloche.sdk.assembly import assemble_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

CORE = "7Jd0vXq9Zt4WmB2Y"  # in every value, so that one search finds all
TOKEN = f"sk-{CORE}cLpR"
VALUE = f"Bearer {TOKEN}"
PLACEHOLDER = f"ph-{CORE}8NhU"
TEAM, ALL, ALONE = f"team-{CORE}", f"for-all-{CORE}", f"for-b-{CORE}"
NAMES = ["api.test", "a.wild.test", "b.wild.test", "wild.test", "other.test", "echo.test", "later.test"]
NEEDLES = shapes(CORE)
SECRETS = (
    Secret(domain="api.test", header="Authorization", value=VALUE),
    Secret(domain="api.test", header="X-Team", value=TEAM),
    Secret(domain="*.wild.test", header="X-Key", value=ALL),
    Secret(domain="b.wild.test", header="X-Key", value=ALONE),
    Secret(domain="echo.test", name="API_TOKEN", value=PLACEHOLDER),
)
POLICY = NetworkPolicy(allow=tuple(f"{host}:*" for host in NAMES), secrets=SECRETS)
PATHS = iter(range(1_000_000))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def far(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FarServer]:
    """Whom this host trusts is said by SSL_CERT_FILE, as an operator would."""
    trust = own_trust(tmp_path_factory.mktemp("far"), NAMES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(trust.bundle))
        async with FarServer(trust) as server:
            yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(far: FarServer, own_place: Path) -> AsyncIterator[Engine]:
    network = NetworkConfig(allow=("*:*",), hosts=dict.fromkeys(NAMES, ADDRESS), internal=(ADDRESS,))
    try:
        made = assemble_engine(Config(data_dir=str(own_place), network=network))
    except errors.IsolationUnavailable as error:
        pytest.skip(str(error))
    async with made as engine:
        yield engine


@pytest.fixture(scope="module")
def own_place(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory of its own, to be looked into."""
    return with_template(tmp_path_factory.mktemp("secrets") / "data", template)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(engine: Engine) -> AsyncIterator[Sandbox]:
    sandbox = await engine.create(
        SandboxSpec(network=POLICY, owner="tests", env={"MARKER": "".join(("mark", "-4242"))})
    )
    await sandbox.files.write("/tmp/httpx.zip", httpx_archive())
    yield sandbox
    await sandbox.kill()


@pytest.fixture
def path() -> str:
    """One that no other test asks for."""
    return f"/p{next(PATHS)}"


async def run(box: Sandbox, code: str, language: str = "python") -> str:
    """What the code prints. It must not fail."""
    result = fold([event async for event in box.default_context(language).execute(code)])
    assert result.error is None, result.error
    return result.stdout


async def shell(box: Sandbox, command: str, **how: str) -> str:
    """What a command says, and at the end how it ended."""
    result = await box.commands.run(command, **how)
    return f"{result.stdout}{result.stderr}={result.exit_code}"


NODE = os.path.realpath(shutil.which("node") or "/")
needs_node = pytest.mark.skipif(
    not NODE.startswith("/usr/"), reason="this host has no Node.js that sandboxes would see"
)


# -- programs use them

PROGRAMS = {
    "urllib": "import urllib.request; print(urllib.request.urlopen('URL').status)",
    "requests": "import requests; print(requests.get('URL').status_code)",
    "a session of requests": "import requests; s = requests.Session(); print(s.post('URL', json=[1]).status_code)",
    "http.client": (
        "import http.client, ssl, urllib.parse; u = urllib.parse.urlsplit('URL')\n"
        "c = http.client.HTTPSConnection('127.0.0.1', 49980); c.set_tunnel(u.hostname, u.port)\n"
        "c.request('GET', u.path); print(c.getresponse().status)"
    ),
    "httpx": (
        "import sys; sys.path.insert(0, '/tmp/httpx.zip')\n"
        "import httpx; client = httpx.Client(); print(client.get('URL').status_code)"
    ),
    "wget": "!wget -q -O /dev/null --tries 1 URL && echo 200",
    "curl": "!curl -sS -w '%{{http_code}}' -o /dev/null URL",
    "curl over SOCKS": "!curl -sS -x socks5h://127.0.0.1:49980 -w '%{{http_code}}' -o /dev/null URL",
}


if not shutil.which("wget"):
    del PROGRAMS["wget"]


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_program_uses_a_secret_that_it_never_had(box: Sandbox, far: FarServer, program: str, path: str) -> None:
    assert "200" in await run(box, PROGRAMS[program].replace("URL", f"https://api.test:{far.port}{path}"))
    seen = far.asked(path).headers
    assert (seen["authorization"], seen["x-team"]) == (VALUE, TEAM)


@needs_node
async def test_fetch_of_node_uses_one_in_a_kernel_and_in_a_command(box: Sandbox, far: FarServer) -> None:
    script = f"fetch('https://api.test:{far.port}/node').then(r => r.text()).then(t => console.log(t))"
    assert "/node" in await shell(box, f'node -e "{script}"')
    assert "/js" in await run(box, f"await {script.replace('/node', '/js')}", "javascript")
    assert [far.asked(each).headers["authorization"] for each in ("/node", "/js")] == [VALUE] * 2


@pytest.mark.parametrize("user", ["user", "root"])
async def test_commands_of_both_users_and_bash_kernels_use_one(box: Sandbox, far: FarServer, user: str) -> None:
    assert "/command" in await shell(box, f"curl -sS https://api.test:{far.port}/command-{user}", user=user)
    assert "/bash" in await run(box, f"curl -sS https://api.test:{far.port}/bash-{user}", "bash")
    for path in (f"/command-{user}", f"/bash-{user}"):
        assert far.asked(path).headers["authorization"] == VALUE


async def test_kernels_of_root_use_one(engine: Engine, far: FarServer) -> None:
    box = await engine.create(SandboxSpec(network=POLICY, user="root"))
    try:
        url = f"https://api.test:{far.port}/as-root"
        assert "200" in await run(box, PROGRAMS["requests"].replace("URL", url))
        assert far.asked("/as-root").headers["authorization"] == VALUE
    finally:
        await box.kill()


async def test_a_placeholder_becomes_the_value_in_headers_and_nowhere_else(
    box: Sandbox, far: FarServer, path: str
) -> None:
    url = f"https://echo.test:{far.port}{path}"
    assert (await shell(box, "echo $API_TOKEN")).startswith("$API_TOKEN\n")
    await shell(box, f'curl -sS -H "X-Key: k=$API_TOKEN" -u "me:$API_TOKEN" "{url}?$API_TOKEN" -d "$API_TOKEN"')
    seen = far.asked(path)
    assert seen.headers["x-key"] == f"k={PLACEHOLDER}"
    assert seen.headers["authorization"] == "Basic " + base64.b64encode(f"me:{PLACEHOLDER}".encode()).decode()
    assert (seen.target, seen.body) == (f"{path}?$API_TOKEN", b"$API_TOKEN")


async def test_hosts_below_a_wildcard_get_theirs_and_the_domain_itself_does_not(box: Sandbox, far: FarServer) -> None:
    for host in ("a.wild.test", "b.wild.test", "wild.test"):
        assert "=0" in await shell(box, f"curl -sS https://{host}:{far.port}/at-{host}")
    got = [far.asked(f"/at-{host}").headers.get("x-key") for host in ("a.wild.test", "b.wild.test", "wild.test")]
    assert got == [ALL, ALONE, None]


async def test_without_tls_there_is_no_secret(box: Sandbox, far: FarServer, path: str) -> None:
    url = f"http://api.test:{far.plain_port}{path}"
    assert path in await shell(box, f"curl -sS {url}")
    assert path in await shell(box, f"curl -sS -x socks5h://127.0.0.1:49980 {url}/socks")
    assert "authorization" not in far.asked(path).headers | far.asked(f"{path}/socks").headers


async def test_a_redirect_to_another_host_takes_no_secret_along(box: Sandbox, far: FarServer) -> None:
    before = len(far.seen)
    assert "/landed" in await shell(box, f"curl -sSL https://api.test:{far.port}/away")
    assert "200" in await run(box, PROGRAMS["requests"].replace("URL", f"https://api.test:{far.port}/away"))
    landed = [seen for seen in far.seen[before:] if seen.target == "/landed"]
    assert len(landed) == 2
    assert not any({"authorization", "x-team"} & seen.headers.keys() for seen in landed)


# -- and never have them


async def test_an_echo_is_covered_before_it_comes_in(box: Sandbox, far: FarServer) -> None:
    said = await shell(box, f"curl -sSi https://api.test:{far.port}/echo")
    assert "*" * len(VALUE) in said and TOKEN not in said
    said = await shell(box, f'curl -sSi -u "me:$API_TOKEN" https://echo.test:{far.port}/echo')
    assert base64.b64encode(PLACEHOLDER.encode())[:12].decode() not in said and "Basic bWU6" in said


async def test_no_process_of_the_sandbox_has_a_value_in_its_memory_or_environment(
    engine: Engine, far: FarServer
) -> None:
    """While programs hold connections on which the value was sent, and the answers to them."""
    box = await engine.create(SandboxSpec(network=POLICY, env={"MARKER": "mark-4242"}))
    await run(
        box,
        "import os, requests; kept = requests.Session()\n"
        f"answers = [kept.get('https://api.test:{far.port}/echo') for _ in range(3)]\n"
        f"answers.append(kept.get('https://echo.test:{far.port}/echo', auth=('me', os.environ['API_TOKEN'])))",
    )
    async with await box.commands.start(f"curl -sS https://api.test:{far.port}/echo; sleep 600") as waiting:
        try:
            found = await asyncio.to_thread(found_in_memory, box, [*NEEDLES, b"mark-4242", b"x-echo-x-team"])
        except PermissionError:
            pytest.skip("this user may not read the memory of a sandbox's processes: only root may here")
        finally:
            box.commands.kill(waiting.id)
    await box.kill()
    assert found.pop(b"mark-4242") > 0 and found.pop(b"x-echo-x-team") > 0  # what is there is found
    assert not any(found.values()), found


async def test_no_file_of_the_sandbox_holds_a_value(box: Sandbox) -> None:
    places = "/run /tmp /var/tmp /home /mnt /root /dev/shm /etc"
    for needle in NEEDLES:
        # The pattern is made inside, so that grep does not find itself.
        half = len(needle) // 2
        pattern = f"{needle[:half].decode()}''{needle[half:].decode()}"
        said = await shell(box, f"grep -rlsF -e '{pattern}' {places}", user="root")
        assert said == "=1"


async def test_neither_logs_nor_records_nor_descriptions_hold_a_value(
    engine: Engine, box: Sandbox, far: FarServer, own_place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await shell(box, f"curl -sS https://api.test:{far.port}/logged")
    entries = box.network.log
    assert entries and all(entry.host in NAMES for entry in entries)
    told = [
        repr(entries),
        repr(box.network.policy),
        repr(box.network.policy.redacted()),
        repr(box.spec),
        repr(box.info),
    ]
    told += [repr(box.record), *capfd.readouterr()]
    written = [each.read_bytes() for each in own_place.rglob("*") if each.is_file() and "templates" not in each.parts]
    assert any(b"SQLite" in content for content in written)
    for needle in NEEDLES:
        assert not any(needle.decode() in text for text in told)
        assert not any(needle in content for content in written)


CONFIG = """
[network]
allow = ["*:*"]
internal = ["{address}"]
[network.hosts]
"api.test" = "{address}"
"""
DESCRIPTIONS = (
    "/api/v1/sandboxes/ID",
    "/api/v1/sandboxes/ID/network",
    "/api/v1/sandboxes/ID/network/log",
    "/e2b/sandboxes/ID",
    "/v1/containers/cntr_ID",
    "/opensandbox/v1/sandboxes/ID",
)


async def test_no_dialect_of_a_server_tells_a_value_and_its_log_has_none(
    far: FarServer, own_place: Path, tmp_path: Path
) -> None:
    config, log = tmp_path / "cloche.toml", tmp_path / "log"
    config.write_text(CONFIG.format(address=ADDRESS))

    def use() -> list[str]:
        with (
            serving(own_place, env={"CLOCHE_CONFIG": str(config)}, log=log) as server,
            httpx.Client(base_url=server.url) as http,
        ):
            network, secrets = {"allow": ["api.test:*"]}, [{"domain": "api.test", "header": "X-Key", "value": VALUE}]
            with cloche.Sandbox(network=network, secrets=secrets, url=server.url, api_key=server.key) as box:
                said = box.commands.run(f"curl -sS https://api.test:{far.port}/by-server; env")
                headers = {"X-API-Key": server.key, "Authorization": f"Bearer {server.key}"}
                answers = [http.get(path.replace("ID", box.id), headers=headers) for path in DESCRIPTIONS]
                wrong = [{"domain": "api.test", "header": VALUE, "value": VALUE, "more": VALUE}]
                answers.append(http.post("/api/v1/sandboxes", headers=headers, json={"secrets": wrong}))
                shown = [repr(box.network.policy), repr(box.network.log()), repr(box.info())]
        assert answers[-1].status_code == 400
        assert [each.status_code for each in answers[:5]] == [200] * 5
        return [said.stdout, said.stderr, *shown, *(each.text for each in answers)]

    told = await asyncio.to_thread(use)
    assert far.asked("/by-server").headers["x-key"] == VALUE
    assert "network.allowed" in log.read_text()
    kept = [each.read_bytes() for each in own_place.rglob("*") if each.is_file() and "templates" not in each.parts]
    for needle in NEEDLES:
        assert not [text for text in (*told, log.read_text()) if needle.decode() in text]
        assert not [content for content in kept if needle in content]


# -- whose they are


async def test_another_sandbox_has_neither_the_secret_nor_the_trust(
    engine: Engine, box: Sandbox, far: FarServer, path: str
) -> None:
    other = await engine.create(SandboxSpec(network=NetworkPolicy(allow=POLICY.allow)))
    try:
        assert path in await shell(other, f"curl -sS https://api.test:{far.port}{path}")
        assert "authorization" not in far.asked(path).headers
        theirs, ours = [await each.files.read("/run/cloche/ca.pem") for each in (other, box)]
        assert theirs.count(b"BEGIN") == 1 and ours.count(b"BEGIN") == 2
        await other.files.write("/tmp/ca.pem", ours)
        await box.files.write("/tmp/ca.pem", theirs)
        assert "=60" in await shell(box, f"curl -sS --cacert /tmp/ca.pem https://api.test:{far.port}{path}")
    finally:
        await other.kill()


async def test_the_bundle_is_owned_by_root_and_holds_the_hosts_authorities(
    box: Sandbox, single: bool, far: FarServer
) -> None:
    if not single:  # where both are one identity, a program may remove what is its own
        said = await shell(box, "stat -L -c '%U %a' $SSL_CERT_FILE; echo > $SSL_CERT_FILE; rm -f $SSL_CERT_FILE")
        assert said.startswith("root 644\n") and "=1" in said
    names = await run(box, "import ssl; print(ssl.create_default_context().get_ca_certs())")
    assert "An authority for tests" in names and "Cloche sandbox" in names


# -- policies that change


async def test_a_secret_that_comes_later_works_for_programs_that_start_then(engine: Engine, far: FarServer) -> None:
    box = await engine.create(SandboxSpec(network=NetworkPolicy(allow=("later.test:*",)), owner="tests"))
    try:
        url = f"https://later.test:{far.port}"
        assert "/before" in await shell(box, f"curl -sS {url}/before")
        secrets = (
            Secret(domain="later.test", header="X-Late", value="late-but-there"),
            Secret(domain="later.test", name="LATE", value="by-a-placeholder"),
        )
        await engine.networks.replace(box, NetworkPolicy(allow=("later.test:*",), secrets=secrets))
        assert "/after" in await shell(box, f'curl -sS -H "X-By: $LATE" {url}/after')
        assert "200" in await run(box, PROGRAMS["requests"].replace("URL", f"{url}/in-kernel"))
        await engine.networks.replace(box, NetworkPolicy(allow=("later.test:*",)))
        assert "/gone" in await shell(box, f"curl -sS {url}/gone")
    finally:
        await box.kill()
    got = {each: far.asked(f"/{each}").headers.get("x-late") for each in ("before", "after", "in-kernel", "gone")}
    assert got == {"before": None, "after": "late-but-there", "in-kernel": "late-but-there", "gone": None}
    assert far.asked("/after").headers["x-by"] == "by-a-placeholder"


@pytest.mark.parametrize("had_network", [False, True])
async def test_kernels_of_every_language_that_run_already_use_a_secret_that_comes_later(
    engine: Engine, far: FarServer, had_network: bool
) -> None:
    allow = ("later.test:*",)
    box = await engine.create(SandboxSpec(network=NetworkPolicy(allow=allow if had_network else ())))
    url = f"https://later.test:{far.port}"
    fetches = {
        "bash": "curl -sS URL",
        "javascript": "console.log(await (await fetch('URL')).text())",
        "python": "import requests; print(requests.get('URL').text)",
    }
    try:
        for language in fetches:
            await run(box, {"bash": ":"}.get(language, "1"), language)
        secret = Secret(domain="later.test", header="X-Late", value="late-but-there")
        await engine.networks.replace(box, NetworkPolicy(allow=allow, secrets=(secret,)))
        for language, code in fetches.items():
            path = f"/{language}-{had_network}"
            assert path in await run(box, code.replace("URL", url + path), language)
            assert far.asked(path).headers["x-late"] == "late-but-there"
    finally:
        await box.kill()


async def test_a_full_sandbox_says_so_keeps_its_policy_and_takes_the_secret_later(
    engine: Engine, far: FarServer
) -> None:
    limits = Limits(space_bytes=16 << 20)
    box = await engine.create(SandboxSpec(network=NetworkPolicy(allow=("api.test:*",)), limits=limits))
    wanted = NetworkPolicy(allow=("api.test:*",), secrets=SECRETS[:1])
    try:
        await shell(box, "cat /dev/zero > /tmp/full")
        with pytest.raises(errors.NoSpace, match="certificates"):
            await engine.networks.replace(box, wanted)
        assert "/full" in await shell(box, f"curl -sS https://api.test:{far.port}/full")
        await shell(box, "rm /tmp/full")
        await engine.networks.replace(box, wanted)
        assert "/roomy" in await shell(box, f"curl -sS https://api.test:{far.port}/roomy")
    finally:
        await box.kill()
    assert [far.asked(path).headers.get("authorization") for path in ("/full", "/roomy")] == [None, VALUE]


async def test_a_secret_for_a_host_that_is_not_allowed_is_refused(engine: Engine, box: Sandbox) -> None:
    policy = NetworkPolicy(allow=("other.test:*",), secrets=SECRETS[:1])
    with pytest.raises(errors.InvalidRequest, match=r"the secret for api\.test is of no use"):
        await engine.create(SandboxSpec(network=policy))
    with pytest.raises(errors.InvalidRequest, match="of no use"):
        await engine.networks.replace(box, policy)


async def test_without_a_network_no_environment_is_changed(engine: Engine) -> None:
    box = await engine.create(SandboxSpec(network=NetworkPolicy()))
    try:
        env = json.loads(await run(box, "import json, os; print(json.dumps(dict(os.environ)))"))
    finally:
        await box.kill()
    assert not env.keys() & (PROXY_ENV.keys() | TRUST_ENV.keys())
