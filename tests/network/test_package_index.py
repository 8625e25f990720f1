"""What `pip`, `uv` and `npm` ask at the door and are answered: pages with our own URLs, and files that are checked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.network.index_server import JSON, IndexDoor, IndexServer, Told, index_door, index_doors, index_server, sha256

WHEEL = "demo_pkg-1.0-py3-none-any.whl"


def hrefs(page: str) -> list[str]:
    return [part.partition('"')[0] for part in page.split('href="')[1:]]


@pytest.mark.parametrize("style", ["json", "html"])
async def test_a_page_is_served_as_json_or_html_for_either_index_format(tmp_path: Path, style: str) -> None:
    with index_server(style=style) as index:
        said = {"requires-python": ">=3.9", "yanked": "bad", "core-metadata": f"sha256={sha256(b'Name: x')}"}
        if style == "json":
            said["core-metadata"] = {"sha256": sha256(b"Name: x")}  # type: ignore[assignment]
        index.add_file("demo-pkg", WHEEL, b"wheel", **said)
        async with index_door(tmp_path, index) as door:
            as_json = (await door.get("/pypi/simple/demo-pkg/", accept=JSON)).json()
            as_html = (await door.get("/pypi/simple/demo-pkg/", accept="text/html")).text
    path = f"/pypi/files/demo-pkg/{WHEEL}"
    assert as_json["name"] == "demo-pkg"
    assert as_json["files"] == [
        {
            "filename": WHEEL,
            "url": path,
            "hashes": {"sha256": sha256(b"wheel")},
            "requires-python": ">=3.9",
            "core-metadata": {"sha256": sha256(b"Name: x")},
            "dist-info-metadata": {"sha256": sha256(b"Name: x")},
            "yanked": "bad",
        }
    ]
    assert hrefs(as_html) == [f"{path}#sha256={sha256(b'wheel')}"]
    assert 'data-requires-python="&gt;=3.9"' in as_html
    assert 'data-yanked="bad"' in as_html
    assert f'data-core-metadata="sha256={sha256(b"Name: x")}"' in as_html


async def test_a_file_and_its_metadata_come_through_our_own_urls(index: IndexServer, door: IndexDoor) -> None:
    path = index.add_file("demo", WHEEL, b"the wheel" * 100, **{"core-metadata": {"sha256": sha256(b"Name: demo")}})
    index.told[path + ".metadata"] = Told(b"Name: demo")
    wheel = await door.get(f"/pypi/files/demo/{WHEEL}")
    metadata = await door.get(f"/pypi/files/demo/{WHEEL}.metadata")
    assert (wheel.status_code, wheel.content) == (200, b"the wheel" * 100)
    assert (metadata.status_code, metadata.content) == (200, b"Name: demo")


async def test_a_projects_name_is_one_in_every_spelling(index: IndexServer, door: IndexDoor) -> None:
    index.add_file("demo-pkg", WHEEL, b"wheel")
    for spelling in ("Demo_Pkg", "demo.pkg", "DEMO--pkg", "demo-pkg"):
        assert (await door.get(f"/pypi/simple/{spelling}/")).status_code == 200
    assert {asked.path for asked in index.asked} == {"/simple/demo-pkg/"}


async def test_local_versions_and_epochs_keep_their_names(index: IndexServer, door: IndexDoor) -> None:
    index.add_file("torch", "torch-1!2.0+cpu-py3-none-any.whl", b"wheel")
    (href,) = hrefs((await door.get("/pypi/simple/torch/")).text)
    assert href.startswith("/pypi/files/torch/torch-1%212.0%2Bcpu-py3-none-any.whl#")
    assert (await door.get(href.partition("#")[0])).content == b"wheel"


async def test_relative_urls_are_resolved_where_a_redirect_led(index: IndexServer, door: IndexDoor) -> None:
    index.add_file("moved", WHEEL, b"wheel", at=f"../{WHEEL}")
    index.told["/elsewhere/moved/"] = index.told["/simple/moved/"]
    index.told["/simple/moved/"] = Told(status=301, headers={"location": "/elsewhere/moved/"})
    index.told[f"/elsewhere/{WHEEL}"] = index.told[f"/files/{WHEEL}"]
    assert (await door.get(f"/pypi/files/moved/{WHEEL}")).content == b"wheel"
    assert index.count(f"/elsewhere/{WHEEL}") == 1


async def test_parts_of_a_file_can_be_asked_for(index: IndexServer, door: IndexDoor) -> None:
    index.add_file("demo", WHEEL, bytes(range(100)))
    path = f"/pypi/files/demo/{WHEEL}"
    whole = await door.get(path)
    head = await door.send("HEAD", path)
    middle, end = await door.get(path, range="bytes=10-19"), await door.get(path, range="bytes=-5")
    assert (head.headers["content-length"], head.headers["accept-ranges"], head.content) == ("100", "bytes", b"")
    assert (middle.status_code, middle.content) == (206, bytes(range(10, 20)))
    assert (middle.headers["content-range"], end.content) == ("bytes 10-19/100", bytes(range(95, 100)))
    assert (await door.get(path, range="bytes=100-")).status_code == 416
    assert (await door.get(path, range="bytes=1-", if_range='"another"')).status_code == 200
    assert (await door.get(path, range="bytes=1-", if_range=whole.headers["etag"])).status_code == 206


async def test_one_connection_can_ask_many_times_and_each_has_a_line(index: IndexServer, door: IndexDoor) -> None:
    index.add_file("demo", WHEEL, b"wheel")
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    target = f"/pypi/files/demo/{WHEEL}"
    request = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    writer.write(request + request + request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    said = await reader.read()
    writer.close()
    assert said.count(b"HTTP/1.1 200 OK") == 3
    lines = [(entry.protocol, entry.verdict, entry.received_bytes) for entry in door.log]
    assert lines == [("package", "allowed", 5)] * 3
    assert {(entry.host, entry.port) for entry in door.log} == {("127.0.0.1", index.port)}
    assert {entry.reason for entry in door.log} == {"pypi:demo"}  # which package, and not which file
    assert door.egress.package_files == {"hit": 2, "miss": 1}


async def test_an_npm_package_names_tarballs_of_ours(index: IndexServer, door: IndexDoor) -> None:
    index.add_package("left-pad", "1.3.0", b"tarball", signatures=[{"keyid": "x"}])
    short = "application/vnd.npm.install-v1+json"
    answer = await door.get("/npm/left-pad", accept=f"{short}; q=1.0, application/json; q=0.8, */*")
    dist = answer.json()["versions"]["1.3.0"]["dist"]
    assert answer.headers["content-type"] == short
    assert dist["tarball"] == f"{door.url}/npm/left-pad/-/left-pad-1.3.0.tgz"
    assert dist["signatures"] == [{"keyid": "x"}]
    assert short in index.asked[0].headers["accept"]
    assert (await door.get("/npm/left-pad/-/left-pad-1.3.0.tgz")).content == b"tarball"


@pytest.mark.parametrize("spelling", ["@scope%2fthing", "@scope%2Fthing", "@scope/thing"])
async def test_a_scoped_npm_package_in_each_spelling(index: IndexServer, door: IndexDoor, spelling: str) -> None:
    index.add_package("@scope/thing", "2.0.0-rc.1", b"scoped")
    answer = await door.get(f"/npm/{spelling}")
    tarball = answer.json()["versions"]["2.0.0-rc.1"]["dist"]["tarball"]
    assert tarball == f"{door.url}/npm/@scope/thing/-/thing-2.0.0-rc.1.tgz"
    assert (await door.get(tarball)).content == b"scoped"


@pytest.mark.parametrize("path", ["@scope%2fthing/1.0.0", "@scope/thing/1.0.0", "@scope/thing/latest"])
async def test_one_version_of_an_npm_package(index: IndexServer, door: IndexDoor, path: str) -> None:
    index.add_package("@scope/thing", "1.0.0", b"scoped")
    manifest = (await door.get(f"/npm/{path}")).json()
    assert manifest["version"] == "1.0.0"
    assert manifest["dist"]["tarball"] == f"{door.url}/npm/@scope/thing/-/thing-1.0.0.tgz"
    assert (await door.get("/npm/@scope/thing/next")).status_code == 404


async def test_npm_telemetry_is_answered_at_once(index: IndexServer, door: IndexDoor) -> None:
    for path in ("/npm/-/npm/v1/security/advisories/bulk", "/npm/-/v1/security/audits", "/npm/-/whoami"):
        assert (await door.send("POST", path, json={"left-pad": ["1.3.0"]})).status_code == 404
    assert index.asked == []


async def test_missing_packages_are_reported_missing(index: IndexServer, door: IndexDoor) -> None:
    index.add_file("demo", WHEEL, b"wheel")
    index.add_package("left-pad", "1.3.0", b"tarball")
    for path in (
        "/pypi/simple/nothing/",
        "/pypi/files/demo/demo-2.0.tar.gz",
        f"/pypi/files/demo/{WHEEL}.metadata",
        "/npm/nothing",
        "/npm/left-pad/-/left-pad-9.9.9.tgz",
        "/",
        "/pypi/",
        "/elsewhere",
    ):
        answer = await door.get(path)
        assert (answer.status_code, "Cloche: " in answer.text) == (404, True), path


async def test_the_operator_says_which_packages(index: IndexServer, tmp_path: Path) -> None:
    for name in ("demo-pkg", "demo-bad", "other"):
        index.add_file(name, f"{name.replace('-', '_')}-1.0.tar.gz", b"sdist")
    for package in ("@corp/ui", "other", "demo-pkg"):
        index.add_package(package, "1.0.0", b"tarball")
    allow, deny = ("Demo_*", "npm:@corp/*"), ("demo.bad", "npm:demo-pkg")
    async with index_door(tmp_path, index, allow=allow, deny=deny) as door:
        codes = {
            path: (await door.get(path)).status_code
            for path in (
                "/pypi/simple/demo-pkg/",
                "/pypi/files/demo-pkg/demo_pkg-1.0.tar.gz",
                "/npm/@corp%2fui",
                "/pypi/simple/demo_bad/",
                "/pypi/files/demo-bad/demo_bad-1.0.tar.gz",
                "/pypi/simple/other/",
                "/npm/other",
                "/npm/demo-pkg",
            )
        }
        refused = await door.get("/pypi/simple/other/")
        last = door.log[-1]
    assert list(codes.values()) == [200, 200, 200, 403, 403, 403, 403, 403], codes
    assert "packages.allow" in refused.text and "other" in refused.text
    assert refused.reason_phrase == "Denied by package policy: pypi:other"  # which is all that some installers show
    assert (last.verdict, last.reason) == ("denied", "pypi:other: the operator does not allow that package")
    assert not any("other" in asked.path or "bad" in asked.path for asked in index.asked)


async def test_why_something_was_refused_can_be_asked_once(index: IndexServer, tmp_path: Path) -> None:
    """pip and uv show a status at most; npm shows what is in `error`."""
    async with index_doors(tmp_path, 2, pypi=(index.simple,), npm=index.url, deny=("bad",)) as (door, other):
        assert (await door.get("/refused")).status_code == 404
        told = (await door.get("/pypi/simple/bad/")).text
        assert "does not allow the package bad" in told
        assert (await other.get("/refused")).status_code == 404
        assert (await door.get("/refused")).text == told
        assert (await door.get("/refused")).status_code == 404
        assert (await door.get("/npm/bad")).json() == {"error": told.strip()}


async def test_to_ask_when_nothing_was_refused_is_no_denial(door: IndexDoor) -> None:
    """Each installation that fails for a reason of its own asks."""
    assert (await door.get("/refused")).status_code == 404
    assert [entry.verdict for entry in door.log] == ["allowed"]


async def test_the_first_index_that_has_a_project_is_the_only_one_for_it(tmp_path: Path) -> None:
    with index_server() as private, index_server() as public:
        private.add_file("corp-tool", "corp_tool-1.0.tar.gz", b"ours")
        public.add_file("corp-tool", "corp_tool-99.0.tar.gz", b"an attacker's")
        public.add_file("requests", "requests-2.0.tar.gz", b"theirs")
        async with index_door(tmp_path, private, public) as door:
            page = (await door.get("/pypi/simple/corp-tool/", accept=JSON)).json()
            assert [file["filename"] for file in page["files"]] == ["corp_tool-1.0.tar.gz"]
            assert (await door.get("/pypi/files/corp-tool/corp_tool-99.0.tar.gz")).status_code == 404
            assert (await door.get("/pypi/files/requests/requests-2.0.tar.gz")).content == b"theirs"
        assert public.count("/simple/corp-tool/") == 0


async def test_an_index_that_fails_is_not_passed_over(tmp_path: Path) -> None:
    with index_server() as private, index_server() as public:
        private.told["/simple/corp-tool/"] = Told(b"broken", status=500)
        public.add_file("corp-tool", "corp_tool-99.0.tar.gz", b"an attacker's")
        async with index_door(tmp_path, private, public) as door:
            answer = await door.get("/pypi/simple/corp-tool/")
        assert answer.status_code == 502
        assert public.asked == []


async def test_a_proxy_of_the_hosts_is_used(
    index: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add_file("demo", WHEEL, b"wheel", at=f"http://index.invalid/{WHEEL}")
    index.told["http://index.invalid/simple/demo/"] = index.told["/simple/demo/"]
    index.told[f"http://index.invalid/{WHEEL}"] = Told(b"wheel")
    async with index_doors(tmp_path, pypi=("http://index.invalid/simple/",), npm=index.url) as (door,):
        monkeypatch.setenv("HTTP_PROXY", index.url)
        assert (await door.get(f"/pypi/files/demo/{WHEEL}")).content == b"wheel"


async def test_a_sandbox_may_ask_so_many_times_a_minute(index: IndexServer, tmp_path: Path) -> None:
    index.add_file("demo", WHEEL, b"wheel")
    where = {"pypi": (index.simple,), "npm": index.url + "/"}
    async with index_doors(tmp_path, 2, requests_per_minute=5, **where) as (greedy, modest):
        codes = [(await greedy.get("/pypi/simple/demo/")).status_code for _ in range(7)]
        assert codes[:5] == [200] * 5
        assert 429 in codes[5:]
        assert (await modest.get("/pypi/simple/demo/")).status_code == 200
        denied = [entry for entry in greedy.log if entry.verdict == "denied"]
    assert denied and "5 times a minute" in denied[0].reason


async def test_a_sandbox_may_take_so_many_bytes(index: IndexServer, tmp_path: Path) -> None:
    index.add_file("demo", WHEEL, bytes(60_000))
    async with index_door(tmp_path, index, sandbox_bytes=100_000) as door:
        assert len((await door.get(f"/pypi/files/demo/{WHEEL}")).content) == 60_000
        second = await door.get(f"/pypi/files/demo/{WHEEL}")
        assert (second.status_code, "100000 bytes" in second.text) == (403, True)
        assert (await door.get("/pypi/simple/demo/")).status_code == 200
        assert door.log[1].verdict == "denied"


async def test_a_head_takes_the_bytes_that_the_host_fetches_for_it(index: IndexServer, tmp_path: Path) -> None:
    names = ("demo-1.0.tar.gz", "demo-2.0.tar.gz")
    for number, name in enumerate(names):
        index.add_file("demo", name, bytes([number]) * 60_000)
    async with index_door(tmp_path, index, sandbox_bytes=100_000) as door:
        heads = [await door.send("HEAD", f"/pypi/files/demo/{name}") for name in names]
        assert [head.status_code for head in heads] == [200, 403]
        assert [entry.verdict for entry in door.log] == ["allowed", "denied"]


async def test_a_file_without_a_hash_is_named_without_one(index: IndexServer, door: IndexDoor) -> None:
    said = {"files": [{"filename": "odd-1.tar.gz", "url": "odd-1.tar.gz"}]}
    index.told["/simple/odd/"] = Told(json.dumps(said).encode(), headers={"content-type": JSON})
    page = (await door.get("/pypi/simple/odd/", accept=JSON)).json()
    assert page["files"] == [{"filename": "odd-1.tar.gz", "url": "/pypi/files/odd/odd-1.tar.gz", "hashes": {}}]
