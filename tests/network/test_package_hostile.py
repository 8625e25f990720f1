"""Programs that want the host to fetch something else, and indexes that say what they should not."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.network.far_server import Trust, own_trust
from tests.network.index_server import (
    JSON,
    IndexDoor,
    IndexServer,
    Told,
    index_door,
    index_doors,
    index_server,
    sha256,
)

from cloche.config.sections import NetworkConfig
from cloche.egress.packages import pypi, upstream

WHEEL = "demo-1.0-py3-none-any.whl"


async def raw(door: IndexDoor, request: bytes) -> bytes:
    """As it is written: no client would send it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


TARGETS = [
    "/pypi/files/http://169.254.169.254/latest/meta-data/",
    "/pypi/files/demo/http:%2f%2f169.254.169.254%2f",
    "/pypi/files/demo/..%2f..%2fsecret.tar.gz",
    "/pypi/files/demo/../../../secret.tar.gz",
    "/pypi/files/../simple/demo/",
    "/pypi/files/demo/%2e%2e/secret.tar.gz",
    "/pypi/files/demo/secret.tar.gz",
    "/pypi/files/demo/demo-1.0-py3-none-any.whl/../../secret",
    "/pypi/files/demo/demo-1.0-py3-none-any.whl%00.metadata",
    "/pypi/files/demo/demo-1.0-py3-none-any.whl.metadata.metadata",
    "/pypi/files/other/demo-1.0-py3-none-any.whl",
    "/pypi/files//demo-1.0-py3-none-any.whl",
    "/pypi/simple/..%2f..%2fsecret/",
    "/pypi/simple/../secret",
    "/pypi/simple/demo%2f..%2f..%2fsecret/",
    "/pypi/simple/169.254.169.254:80/",
    "/pypi/simple/user@host/",
    "/pypi/simple/demo%0d%0aHost:%20evil/",
    "/npm/..%2fsecret",
    "/npm/%2e%2e%2fsecret",
    "/npm/@%2fsecret",
    "/npm/@a%2f..%2fsecret",
    "/npm/http:%2f%2f169.254.169.254",
    "/npm/left-pad/-/..%2f..%2fsecret",
    "/npm/left-pad/-/left-pad-..%2f..%2fsecret.tgz",
    "/npm/left-pad/-/secret.tgz",
    "/npm/left-pad/-/left-pad-1.3.0.tgz%2f..",
    "//169.254.169.254/",
    "//169.254.169.254/pypi/simple/demo/",
    "/pypi/simple/demo/extra/segments/",
    "/pypi\\simple\\demo",
    "/" + "a/" * 200,
]


@pytest.mark.parametrize("target", TARGETS)
async def test_only_files_named_by_a_page_are_fetched(index: IndexServer, door: IndexDoor, target: str) -> None:
    index.add_file("demo", WHEEL, b"wheel")
    index.add_package("left-pad", "1.3.0", b"tarball")
    for path in ("/secret", "/secret/", "/simple/secret/", "/files/secret.tar.gz", "/files/secret"):
        index.told[path] = Told(b"the secret")
    answer = await raw(door, f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404 "), answer[:200]
    assert b"the secret" not in answer
    assert not [asked.path for asked in index.asked if "secret" in asked.path or "169" in asked.path]


async def test_ambiguous_input_is_refused(index: IndexServer, door: IndexDoor) -> None:
    both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
    hidden = b"0\r\n\r\nGET /pypi/simple/hidden/ HTTP/1.1\r\nHost: a\r\n\r\n"
    answer = await raw(door, b"POST /npm/-/x HTTP/1.1\r\nHost: a\r\n" + both + b"\r\n" + hidden)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert index.asked == []


async def test_a_connection_to_the_index_leads_nowhere_else(index: IndexServer, door: IndexDoor) -> None:
    index.add_file("demo", WHEEL, b"wheel")
    first = b"GET /pypi/simple/demo/ HTTP/1.1\r\nHost: a\r\n\r\n"
    answer = await raw(door, first + f"GET {index.url}/secret HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 400 " in answer
    assert index.count("/secret") == 0
    assert [entry.verdict for entry in door.log] == ["allowed", "denied"]


NOTHING = b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n"
PAGE = b"HEAD /pypi/simple/demo/ HTTP/1.1\r\nHost: a\r\n\r\n"


async def test_a_refusal_closes_the_connection(index: IndexServer, door: IndexDoor) -> None:
    for request in (NOTHING, NOTHING.replace(b"GET", b"PUT"), b"GET /npm/-/x HTTP/1.1\r\nHost: a\r\n\r\n"):
        answer = await raw(door, request * 1000)
        assert answer.count(b"HTTP/1.1 4") == 1
        assert b"\r\nconnection: close\r\n" in answer
    assert len(door.log) == 3


async def test_too_many_requests_close_the_connection(index: IndexServer, tmp_path: Path) -> None:
    index.add_file("demo", WHEEL, b"wheel")
    async with index_door(tmp_path, index, requests_per_minute=5) as door:
        answer = await raw(door, PAGE * 500)
        assert (answer.count(b"HTTP/1.1 200 "), answer.count(b"HTTP/1.1 429 ")) == (5, 1)
        assert b"\r\nretry-after: 1\r\n" in answer
        assert [entry.verdict for entry in door.log] == ["allowed"] * 5 + ["denied"]


async def test_other_connections_have_a_turn_after_each_request(index: IndexServer, door: IndexDoor) -> None:
    index.add_file("demo", WHEEL, b"wheel")
    await door.get("/pypi/simple/demo/")
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    answer = await raw(door, PAGE * 100 + NOTHING)
    other.cancel()
    assert answer.count(b"HTTP/1.1 200 ") == 100
    assert turns >= 100


@pytest.mark.parametrize("framing", ["Content-Length: 1000000000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize(
    ("first", "status"), [("POST /npm/-/audit", 404), ("POST /pypi/simple/demo/", 405), ("GET /pypi/simple/demo/", 400)]
)
async def test_a_body_is_not_waited_for(door: IndexDoor, framing: str, first: str, status: int) -> None:
    answer = await raw(door, f"{first} HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"\r\nconnection: close\r\n" in answer


async def test_a_host_header_is_not_repeated_unless_it_is_one(index: IndexServer, door: IndexDoor) -> None:
    index.add_package("left-pad", "1.3.0", b"tarball")
    answer = await raw(door, b'GET /npm/left-pad HTTP/1.1\r\nHost: a"/><script>\r\n\r\n')
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("kind", ["pypi", "npm"])
async def test_a_file_with_another_hash_is_neither_served_nor_kept(
    index: IndexServer, door: IndexDoor, tmp_path: Path, kind: str
) -> None:
    size = 300_000
    if kind == "pypi":
        stored, path = index.add_file("demo", WHEEL, b"good" * (size // 4)), f"/pypi/files/demo/{WHEEL}"
    else:
        stored, path = index.add_package("demo", "1.0.0", b"good" * (size // 4)), "/npm/demo/-/demo-1.0.0.tgz"
    index.told[stored].body = b"evil" * (size // 4)
    got = await taken(door, path)
    assert len(got) < size  # some of a large file may have left before its end was seen, never the whole
    assert (door.log[-1].verdict, "describes" in door.log[-1].reason) == ("failed", True)
    kept = [each.read_bytes() for each in (tmp_path / "packages").rglob("*") if each.is_file()]
    assert not any(b"evil" in content for content in kept)
    index.told[stored].body = b"good" * (size // 4)
    assert await taken(door, path) == b"good" * (size // 4)


async def taken(door: IndexDoor, path: str) -> bytes:
    """What a program has of it in the end, if it breaks off too."""
    got = b""
    try:
        async with door.stream(path) as answer:
            if answer.status_code != 200:
                return b""
            async for part in answer.aiter_raw():
                got += part
    except httpx2.TransportError:
        pass
    return got


async def test_a_small_file_with_another_hash_is_an_error_that_says_so(index: IndexServer, door: IndexDoor) -> None:
    index.told[index.add_file("demo", WHEEL, b"good")].body = b"evil"
    answer = await door.get(f"/pypi/files/demo/{WHEEL}")
    assert (answer.status_code, "sha256" in answer.text) == (502, True)


@pytest.mark.parametrize("length", [1000, 1_000_000])
async def test_a_download_that_breaks_off_is_not_kept(
    index: IndexServer, door: IndexDoor, tmp_path: Path, length: int
) -> None:
    content = bytes(length)
    stored = index.add_file("demo", WHEEL, content)
    index.told[stored] = Told(content[: length // 2], length=length)
    assert len(await taken(door, f"/pypi/files/demo/{WHEEL}")) < length
    assert door.log[-1].verdict == "failed"
    assert not list((tmp_path / "packages").glob("tmp-*"))
    index.told[stored] = Told(content)
    assert await taken(door, f"/pypi/files/demo/{WHEEL}") == content


@pytest.mark.parametrize("says_length", [True, False])
async def test_a_file_over_the_limit_is_not_fetched(index: IndexServer, tmp_path: Path, says_length: bool) -> None:
    stored = index.add_file("demo", WHEEL, bytes(200_000))
    if not says_length:
        index.told[stored] = Told(_chunked(bytes(200_000)), headers=CHUNKED)
    async with index_door(tmp_path, index, file_bytes=100_000) as door:
        answer = await door.get(f"/pypi/files/demo/{WHEEL}")
    assert (answer.status_code, "packages.file_bytes" in answer.text) == (502, True)


CHUNKED = {"transfer-encoding": "chunked"}


def _chunked(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n0\r\n\r\n"


async def test_a_file_without_a_length_comes_whole(index: IndexServer, door: IndexDoor) -> None:
    stored = index.add_file("demo", WHEEL, b"wheel" * 1000)
    index.told[stored] = Told(_chunked(b"wheel" * 1000), headers=CHUNKED)
    answer = await door.get(f"/pypi/files/demo/{WHEEL}")
    assert (answer.content, answer.headers["content-length"]) == (b"wheel" * 1000, "5000")


@pytest.mark.parametrize("compressed", [False, True])
async def test_a_huge_page_is_given_up(
    index: IndexServer, door: IndexDoor, monkeypatch: pytest.MonkeyPatch, compressed: bool
) -> None:
    monkeypatch.setattr(pypi, "MAX_PAGE_BYTES", 1 << 20)
    body = b" " * (8 << 20)
    headers = {"content-type": JSON, **({"content-encoding": "gzip"} if compressed else {})}
    index.told["/simple/huge/"] = Told(gzip.compress(body) if compressed else body, headers=headers)
    answer = await door.get("/pypi/simple/huge/")
    assert (answer.status_code, "over 1048576 bytes" in answer.text) == (502, True)


PAGES = [
    (JSON, b"[" * 100_000),
    (JSON, b"{}"),
    (JSON, b"not json"),
    (JSON, b'{"files": [{"filename": 1}]}'),
    ("text/html", b"<" * 4_000_000),
    ("text/html", b"<a " + b"x=" * 1_000_000),
    ("text/html", b"<!--" * 1_000_000),
    ("text/html", b'<a href="' * 400_000),
    ("text/html", b"<a href='" + b"x" * 3_000_000 + b"'>"),
    ("text/html", b"\xff\xfe<a href=\xff>"),
    ("text/html", b"<![CDATA[" * 300_000),
    ("text/html", b"<!DOCTYPE [" * 300_000),
]


@pytest.mark.parametrize(("kind", "body"), PAGES)
async def test_a_malformed_page_is_harmless(index: IndexServer, door: IndexDoor, kind: str, body: bytes) -> None:
    index.told["/simple/strange/"] = Told(body, headers={"content-type": kind})
    index.add_file("demo", WHEEL, b"wheel")
    answer = await door.get("/pypi/simple/strange/")
    assert answer.status_code in (200, 502)
    assert "<a" not in answer.text
    assert (await door.get(f"/pypi/files/demo/{WHEEL}")).content == b"wheel"


@pytest.mark.parametrize("part", ["hashes", "zz"])
async def test_a_page_of_masses_of_values_is_given_up(index: IndexServer, door: IndexDoor, part: str) -> None:
    """As objects it would take a gibibyte, and the server's time."""
    body = b'{"files":[{"filename":"a-1.tar.gz","url":"a","%s":[' % part.encode() + b"[]," * 600_000 + b"1]}]}"
    index.told["/simple/strange/"] = Told(body, headers={"content-type": JSON})
    assert (await door.get("/pypi/simple/strange/")).status_code == 502
    versions = b'{"versions":{"1.0.0":{' + b",".join(b'"k%d":[]' % number for number in range(1_100_000)) + b"}}}"
    index.told["/strange"] = Told(versions, headers={"content-type": "application/json"})
    assert (await door.get("/npm/strange")).status_code == 502


@pytest.mark.parametrize("body", [b"[" * 100_000, b"[]", b'{"versions": [1]}', b'{"versions": {"1.0.0": 5}}', b"no"])
async def test_a_malformed_packument_is_harmless(index: IndexServer, door: IndexDoor, body: bytes) -> None:
    index.told["/strange"] = Told(body, headers={"content-type": "application/json"})
    assert (await door.get("/npm/strange")).status_code == 502
    assert (await door.get("/npm/strange/-/strange-1.0.0.tgz")).status_code == 502


def test_a_page_is_read_for_files_that_can_be_installed_and_nothing_else() -> None:
    names = ["ok-1.tar.gz", "../up-1.tar.gz", "a b-1.tar.gz", "x-1.exe", "", "-1.whl", "q-1.whl\n", "h-1.whl<script>"]
    said = [{"filename": name, "url": "f"} for name in names]
    said += [{"filename": "ok-1.tar.gz", "url": "second"}, {"filename": "mail-1.whl", "url": "mailto:x"}]
    said += [{"filename": "file-1.whl", "url": "file:///etc/passwd"}, {"filename": "plain-1.whl", "url": "http://a/b"}]
    said += [{"filename": "user-1.whl", "url": "https://me:pw@host/user-1.whl"}]
    page = pypi.read_page("p", json.dumps({"files": said}).encode(), JSON, "https://index/simple/p/")
    assert {file.name: file.url for file in page.files} == {
        "ok-1.tar.gz": "https://index/simple/p/f",
        "user-1.whl": "https://host/user-1.whl",
    }


def test_page_contents_are_escaped_in_ours() -> None:
    said: dict[str, Any] = {"filename": "a-1.whl", "url": "a", "requires-python": '"><script>', "yanked": "<b>"}
    page = pypi.read_page("p", json.dumps({"files": [said]}).encode(), JSON, "https://index/simple/p/")
    assert "<script>" not in pypi.write_html(page).decode()
    assert "<b>" not in pypi.write_html(page).decode()


_LETTERS = st.text(alphabet=st.sampled_from("<>a b=\"'/#:@[]%?.-!x01\n\x00é&;\\"), max_size=60)
_KEYS = st.sampled_from("files filename url hashes yanked size versions dist tarball integrity 1.0.0".split())
_SAID = st.recursive(
    st.none() | st.booleans() | st.integers() | _LETTERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=15,
)


@settings(max_examples=150, deadline=None)
@given(_SAID, _LETTERS)
def test_any_index_page_is_read_or_refused(said: Any, letters: str) -> None:
    where = "https://index/simple/p/"
    for page in (letters, f'<a href="{letters}">', f"<base href='{letters}'><a href='p-1.whl'>"):
        assert pypi.write_html(pypi.read_page("p", page.encode(), "text/html", where)).startswith(b"<!DOCTYPE html>")
    file = {"filename": "p-1.whl", "url": letters, "hashes": said, "yanked": said, "size": said, "core-metadata": said}
    for body in (said, {"files": said}, {"files": [file]}):
        with contextlib.suppress(pypi.BadIndexPage):
            written = pypi.write_json(pypi.read_page("p", json.dumps(body).encode(), JSON, where))
            assert json.loads(written)["name"] == "p"


async def test_a_page_may_not_name_files_in_the_hosts_own_networks(index: IndexServer, door: IndexDoor) -> None:
    with index_server("127.0.0.2") as metadata_service:
        metadata_service.told["/secret.tar.gz"] = Told(b"the secret")
        index.add_file("demo", WHEEL, b"x", at=f"{metadata_service.url}/secret.tar.gz", hashes={})
        index.add_package("demo", "1.0.0", b"x", at=f"{metadata_service.url}/secret.tar.gz", integrity="", shasum="")
        for path in (f"/pypi/files/demo/{WHEEL}", "/npm/demo/-/demo-1.0.0.tgz"):
            answer = await door.get(path)
            assert (answer.status_code, "network.internal" in answer.text) == (502, True)
        assert metadata_service.asked == []


async def test_another_port_of_an_indexs_host_is_another_place(index: IndexServer, door: IndexDoor) -> None:
    with index_server() as neighbour:
        neighbour.told["/secret.tar.gz"] = Told(b"the secret")
        index.add_file("demo", WHEEL, b"x", at=f"{neighbour.url}/secret.tar.gz", hashes={})
        index.add_package("demo", "1.0.0", b"x", at=f"{neighbour.url}/secret.tar.gz", integrity="", shasum="")
        for path in (f"/pypi/files/demo/{WHEEL}", "/npm/demo/-/demo-1.0.0.tgz"):
            answer = await door.get(path)
            assert (answer.status_code, f"127.0.0.1:{neighbour.port}" in answer.text) == (502, True)
        assert neighbour.asked == []


async def test_a_redirect_may_not_lead_there_either(index: IndexServer, door: IndexDoor) -> None:
    with index_server("127.0.0.2") as metadata_service:
        stored = index.add_file("demo", WHEEL, b"x", hashes={})
        index.told[stored] = Told(status=302, headers={"location": f"{metadata_service.url}/secret"})
        assert (await door.get(f"/pypi/files/demo/{WHEEL}")).status_code == 502
        assert metadata_service.asked == []


async def test_the_operator_can_allow_files_in_an_internal_network(index: IndexServer, tmp_path: Path) -> None:
    network = NetworkConfig(internal=("127.0.0.0/8",), hosts={"files.corp.test": "127.0.0.2"})
    with index_server("127.0.0.2") as files:
        files.told["/there.whl"] = Told(b"wheel")
        index.add_file("demo", WHEEL, b"wheel", at=f"http://files.corp.test:{files.port}/there.whl")
        async with index_door(tmp_path, index, network=network) as door:
            assert (await door.get(f"/pypi/files/demo/{WHEEL}")).content == b"wheel"
        assert files.asked[0].headers["host"] == f"files.corp.test:{files.port}"


async def test_redirects_without_end_are_given_up(index: IndexServer, door: IndexDoor) -> None:
    index.told["/simple/round/"] = Told(status=302, headers={"location": "/simple/round/"})
    assert (await door.get("/pypi/simple/round/")).status_code == 502
    assert index.count("/simple/round/") == upstream.MAX_REDIRECTS + 1


@pytest.mark.parametrize("location", ["file:///etc/passwd", "gopher://x/", "", "//[::1", "http://"])
async def test_a_redirect_leads_to_web_servers_only(index: IndexServer, door: IndexDoor, location: str) -> None:
    index.told["/simple/away/"] = Told(status=302, headers={"location": location})
    assert (await door.get("/pypi/simple/away/")).status_code == 502


async def test_credentials_go_to_their_own_host_and_never_inside(tmp_path: Path) -> None:
    network = NetworkConfig(internal=("127.0.0.0/8",))
    with index_server() as index, index_server("127.0.0.2") as files:
        files.told["/there.whl"] = Told(b"wheel", headers={"x-secret": "hunter2"})
        index.add_file("demo", WHEEL, b"wheel", at=f"{files.url}/there.whl")
        index.add_file("demo", "demo-1.0.tar.gz", b"sdist")
        stored = index.add_file("demo", "demo-2.0.tar.gz", b"moved")
        index.told[stored] = Told(status=302, headers={"location": f"{files.url}/moved"})
        files.told["/moved"] = Told(b"moved")
        private = index.simple.replace("http://", "http://me:hunter2@")
        async with index_doors(tmp_path, network=network, pypi=(private,), npm=index.url) as (door,):
            page = await door.get("/pypi/simple/demo/")
            names = (WHEEL, "demo-1.0.tar.gz", "demo-2.0.tar.gz")
            answers = [await door.get(f"/pypi/files/demo/{name}") for name in names]
            missing = await door.get("/pypi/simple/missing/")
            lines = repr(door.log)
    assert [answer.content for answer in answers] == [b"wheel", b"sdist", b"moved"]
    sent = {asked.path: asked.headers.get("authorization", "") for asked in index.asked}
    assert sent["/simple/demo/"].startswith("Basic ")
    assert [asked.headers.get("authorization") for asked in files.asked] == [None, None]
    inside = "".join(str(each.headers) + each.text for each in (page, missing, *answers)) + lines
    assert "hunter2" not in inside
    assert sent["/simple/demo/"] not in inside


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Trust:
    return own_trust(tmp_path_factory.mktemp("trust"), ["index.test"])


@asynccontextmanager
async def over_tls(
    trust: Trust, directory: Path, name: str = "index.test"
) -> AsyncIterator[tuple[IndexServer, IndexDoor]]:
    """An index that is called `name`, with a certificate of index.test."""
    network = NetworkConfig(hosts={name: "127.0.0.1"})
    with index_server(tls=trust.server) as index:
        where = f"https://{name}:{index.port}/simple/"
        async with index_doors(directory, network=network, pypi=(where,), npm=where) as (door,):
            yield index, door


@pytest.mark.parametrize("name", ["index.test", "another.test"])
@pytest.mark.parametrize("is_trusted", [True, False])
async def test_an_index_must_prove_its_identity(
    trust: Trust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_trusted: bool
) -> None:
    monkeypatch.setenv("PIP_CERT", str(trust.bundle)) if is_trusted else monkeypatch.delenv("PIP_CERT", raising=False)
    async with over_tls(trust, tmp_path, name) as (index, door):
        index.add_file("demo", WHEEL, b"wheel")
        answer = await door.get(f"/pypi/files/demo/{WHEEL}")
        if is_trusted and name == "index.test":
            assert answer.content == b"wheel"
        else:
            assert (answer.status_code, "certificate is not trusted" in answer.text) == (502, True)
            assert index.asked == []


async def test_a_host_that_pip_trusts_need_not(trust: Trust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_TRUSTED_HOST", "index.test")
    async with over_tls(trust, tmp_path) as (index, door):
        index.add_file("demo", WHEEL, b"wheel")
        assert (await door.get(f"/pypi/files/demo/{WHEEL}")).content == b"wheel"


async def test_nothing_leads_from_tls_to_plain_http(
    trust: Trust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CERT", str(trust.bundle))
    with index_server() as plain:
        plain.told[f"/{WHEEL}"] = Told(b"wheel")
        async with over_tls(trust, tmp_path) as (index, door):
            index.add_file("demo", WHEEL, b"wheel", at=f"{plain.url}/{WHEEL}")
            index.told["/simple/away/"] = Told(status=302, headers={"location": f"{plain.url}/{WHEEL}"})
            assert (await door.get(f"/pypi/files/demo/{WHEEL}")).status_code == 404
            assert (await door.get("/pypi/simple/away/")).status_code == 502
        assert plain.asked == []


async def test_a_part_of_a_file_that_must_be_fetched_counts_as_the_whole(index: IndexServer, tmp_path: Path) -> None:
    for number in range(3):
        index.add_file("demo", f"demo-{number}.tar.gz", bytes([number]) * 50_000)
    async with index_door(tmp_path, index, sandbox_bytes=100_100) as door:
        codes = [
            (await door.get(f"/pypi/files/demo/demo-{number}.tar.gz", range="bytes=-1")).status_code
            for number in (0, 0, 1, 2)
        ]
    assert codes == [206, 206, 206, 403]


async def test_an_aborted_download_is_charged_in_full(index: IndexServer, tmp_path: Path) -> None:
    for number in range(3):
        index.add_file("demo", f"demo-{number}.tar.gz", bytes([number]) * (4 << 20))
    async with index_door(tmp_path, index, sandbox_bytes=9 << 20) as door:
        codes = []
        for number in range(3):
            async with door.stream(f"/pypi/files/demo/demo-{number}.tar.gz") as answer:
                codes.append(answer.status_code)
    assert codes == [200, 200, 403]


async def test_a_slow_index_delays_no_other_request(index: IndexServer, tmp_path: Path) -> None:
    gate = threading.Event()
    index.add_file("demo", WHEEL, b"wheel")
    index.add_file("slow", "slow-1.0.tar.gz", b"slow")
    index.told["/simple/slow/"].gate = gate
    where = {"pypi": (index.simple,), "npm": index.url}
    async with index_doors(tmp_path, 2, **where) as (greedy, modest):
        waiting = [asyncio.create_task(greedy.get("/pypi/simple/slow/")) for _ in range(40)]
        assert (await modest.get(f"/pypi/files/demo/{WHEEL}")).content == b"wheel"
        gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
    assert index.count("/simple/slow/") == 1


async def test_a_silent_index_is_given_up(index: IndexServer, door: IndexDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "SILENCE_SECONDS", 0.2)
    gate = threading.Event()
    stored = index.add_file("demo", WHEEL, b"wheel" * 100)
    index.told[stored].gate = gate
    answer = await door.get(f"/pypi/files/demo/{WHEEL}")
    gate.set()
    assert (answer.status_code, "too long" in answer.text) == (502, True)


async def test_a_leaving_reader_ends_the_download(index: IndexServer, door: IndexDoor, tmp_path: Path) -> None:
    gate = threading.Event()
    stored = index.add_file("demo", WHEEL, bytes(4 << 20))
    index.told[stored].gate = gate
    async with door.stream(f"/pypi/files/demo/{WHEEL}") as answer:
        async for _ in answer.aiter_raw():
            break
    async with asyncio.timeout(20):
        while list((tmp_path / "packages").glob("tmp-*")):
            await asyncio.sleep(0.01)
    gate.set()
    assert sha256(bytes(4 << 20)) not in {each.name for each in (tmp_path / "packages").rglob("*")}
