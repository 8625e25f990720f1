"""Which sandbox and port a request is for, and what is said when there is none."""

from __future__ import annotations

import httpx
import pytest
from e2b_code_interpreter import Sandbox
from tests.conftest import serving

from cloche import errors
from cloche.api.e2b.port_target import is_api_host, is_signed_file_url, port_target_of, strip_e2b_prefix

ID = "i" + "a1" * 10
NO_SUCH = "i" + "0" * 20


def scope(path: str = "/", query: str = "", **headers: str) -> dict:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": path, "raw_path": path.encode(), "query_string": query.encode(), "headers": raw}


def by(asked: dict, domain: str = "") -> tuple[str, int] | None:
    target = port_target_of(asked, domain)
    return None if target is None else (target.sandbox, target.port)


# -- by name


@pytest.mark.parametrize(
    "host",
    [f"49999-{ID}.localhost:8000", f"49999-{ID}.example.com", f"49999-{ID.upper()}.Example.com", f"49999-{ID}-abc.x.y"],
)
def test_a_host_name_names_a_port_of_a_sandbox(host):
    assert by(scope(host=host)) == (ID, 49999)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "127.0.0.1:8000",
        "[::1]:8000",
        "[::1]",
        "example.com",
        "8000-laptop.example.com",  # the machine's own name at many a provider
        f"49999-{ID}",
        f"{ID}.example.com",
        f"x49999-{ID}.example.com",
        "",
    ],
)
def test_other_host_names_name_none(host):
    assert by(scope(host=host)) is None


def test_with_a_domain_only_names_below_it_count():
    assert by(scope(host="80-whatever.boxes.test:444"), "boxes.test") == ("whatever", 80)
    assert by(scope(host="80-whatever.boxes.test"), "boxes.test:8443") == ("whatever", 80)
    assert by(scope(host="80-whatever.elsewhere.test"), "boxes.test") is None


def test_a_whole_name_may_end_with_a_dot():
    assert by(scope(host=f"80-{ID}.boxes.test."), "boxes.test") == (ID, 80)
    assert by(scope(host=f"80-{ID}.boxes.test.:444"), "boxes.test") == (ID, 80)
    assert by(scope(host=f"80-{ID}.localhost.")) == (ID, 80)
    assert by(scope(host=f"80-{ID}.")) is None
    assert is_api_host(scope(host="api.boxes.test."), "boxes.test")


@pytest.mark.parametrize("host", [f"80-{ID}.elsewhere.test", f"80-{ID}.a.boxes.test", f"80-{ID}.test:8000"])
def test_with_a_domain_a_sandbox_below_another_is_refused_and_not_taken_for_the_server(host):
    with pytest.raises(errors.InvalidRequest, match=r"^Invalid host$"):
        port_target_of(scope(host=host), "boxes.test")
    assert by(scope(host=host, e2b_sandbox_id=ID, e2b_sandbox_port="81"), "boxes.test") == (ID, 81)


def test_a_domain_has_a_name_for_the_control_plane():
    assert is_api_host(scope(host="api.boxes.test:8443"), "boxes.test")
    assert not is_api_host(scope(host="api.boxes.test"), "")
    assert not is_api_host(scope(host="api.other.test"), "boxes.test")


# -- by headers


def test_two_headers_name_a_port_of_a_sandbox():
    assert by(scope(host="[::1]:8000", e2b_sandbox_id=ID, e2b_sandbox_port="49983")) == (ID, 49983)
    assert by(scope(host="sandbox.boxes.test", e2b_sandbox_id=ID, e2b_sandbox_port="1"), "boxes.test") == (ID, 1)


def test_an_id_of_old_carries_a_clients_id_which_is_cut_off():
    assert by(scope(e2b_sandbox_id=f"{ID}-6532622b", e2b_sandbox_port="80")) == (ID, 80)


def test_a_host_name_wins_over_headers():
    named = scope(host=f"80-{ID}.localhost", e2b_sandbox_id=NO_SUCH, e2b_sandbox_port="81")
    assert by(named) == (ID, 80)


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"e2b_sandbox_id": ID}, "missing header"),
        ({"e2b_sandbox_port": "80"}, "missing header"),
        ({"e2b_sandbox_id": "", "e2b_sandbox_port": "80"}, "Invalid sandbox ID"),
        ({"e2b_sandbox_id": "../etc", "e2b_sandbox_port": "80"}, "Invalid sandbox ID"),
        ({"e2b_sandbox_id": "A" * 21, "e2b_sandbox_port": "80"}, "Invalid sandbox ID"),
        ({"e2b_sandbox_id": ID, "e2b_sandbox_port": "0"}, "Invalid sandbox port"),
        ({"e2b_sandbox_id": ID, "e2b_sandbox_port": "65536"}, "Invalid sandbox port"),
        ({"e2b_sandbox_id": ID, "e2b_sandbox_port": "http"}, "Invalid sandbox port"),
        ({"e2b_sandbox_id": ID, "e2b_sandbox_port": "²"}, "Invalid sandbox port"),
    ],
)
def test_headers_that_can_name_none_are_refused_in_e2bs_words(headers, said):
    with pytest.raises(errors.InvalidRequest, match=said):
        port_target_of(scope(**headers), "")


def test_signed_file_urls_lose_the_prefix_and_are_known_without():
    assert is_signed_file_url(scope("/files", "path=a&signature=v1_x"))
    assert is_signed_file_url(scope("/e2b/files", "signature=v1_x"))
    assert not is_signed_file_url(scope("/files", "path=a"))


def test_routed_applications_see_no_prefix():
    asked = scope("/e2b/a b")
    asked["raw_path"] = b"/e2b/a%20b"
    strip_e2b_prefix(asked)
    assert (asked["path"], asked["raw_path"]) == ("/a b", b"/a%20b")


# -- over a socket


@pytest.fixture(scope="module")
def box(server):
    made = Sandbox.create(**server.e2b)
    yield made
    made.kill()


def at(box: Sandbox, port: int, **more: str) -> dict[str, str]:
    return {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": str(port), **more}


def test_a_sandbox_is_reached_by_host_name(server, box):
    token = {"X-Access-Token": box._envd_access_token}
    answer = httpx.get(f"{server.url}/health", headers={"Host": f"49983-{box.sandbox_id}.localhost", **token})
    assert answer.status_code == 204


@pytest.mark.parametrize(("port", "status"), [(49983, 401), (49999, 403), (8000, 403)])
def test_a_sandbox_that_never_was_is_as_closed_as_one_that_is_private(server, port, status):
    private = Sandbox.create(network={"allow_public_traffic": False}, **server.e2b)
    answers = []
    for id in (NO_SUCH, private.sandbox_id):
        answer = httpx.get(f"{server.url}/e2b/health", headers={"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": str(port)})
        answers.append((answer.status_code, answer.text.replace(id, "ID")))
    private.kill()
    assert answers[0] == answers[1]
    assert answers[0][0] == status


def test_the_end_reason_is_shown_to_holders_of_its_token(server):
    box = Sandbox.create(**server.e2b)
    token = box.traffic_access_token
    box.kill()
    url = f"{server.url}/e2b/health"
    stranger = httpx.get(url, headers=at(box, 49999))
    holder = httpx.get(url, headers=at(box, 49999, **{"E2B-Traffic-Access-Token": token})).json()
    assert (stranger.status_code, "not found" in stranger.text) == (403, False)
    public = httpx.get(url, headers=at(box, 8000)).json()
    assert public["message"] == "The sandbox was not found"
    assert holder["message"].startswith(f"The sandbox was not found: sandbox {box.sandbox_id} was killed at 20")


def test_a_port_where_nothing_listens_says_so(server, box):
    answer = httpx.get(f"{server.url}/e2b/", headers=at(box, 8123))
    assert answer.status_code == 502
    assert answer.json()["sandboxId"] == box.sandbox_id
    assert "port is not open" in answer.json()["message"]


def test_headers_that_name_nothing_are_a_400_in_words(server):
    answer = httpx.get(f"{server.url}/e2b/health", headers={"E2b-Sandbox-Id": NO_SUCH})
    assert (answer.status_code, answer.text[:14]) == (400, "missing header")


@pytest.mark.parametrize("port", [49983, 49999])
def test_a_web_page_may_ask_a_sandbox(server, box, port):
    asking = at(box, port, Origin="https://page.test")
    asking |= {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-access-token"}
    leave = httpx.options(f"{server.url}/e2b/execute", headers=asking)
    assert leave.status_code == 204
    assert leave.headers["access-control-allow-origin"] == "*"
    assert leave.headers["access-control-allow-headers"] == "x-access-token"
    refused = httpx.post(f"{server.url}/e2b/execute", headers=at(box, port, Origin="https://page.test"))
    assert refused.status_code in (401, 403)
    assert refused.headers["access-control-allow-origin"] == "*"


def test_no_web_page_may_ask_the_control_plane(server):
    asking = {"Origin": "https://page.test", "Access-Control-Request-Method": "POST"}
    leave = httpx.options(f"{server.url}/e2b/v2/sandboxes", headers=asking)
    assert leave.status_code == 405
    assert "access-control-allow-origin" not in leave.headers


def test_a_path_that_is_not_there_is_an_error_of_e2bs_shape(server, box):
    for headers in ({}, at(box, 49983, **{"X-Access-Token": box._envd_access_token})):
        answer = httpx.post(f"{server.url}/e2b/init", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (404, 404)


def test_a_client_that_knows_only_a_domain_finds_everything(bare_dir):
    with serving(bare_dir, "--domain", "boxes.test") as running:
        api = {"Host": "api.boxes.test", "X-API-Key": running.key}
        made = httpx.post(f"{running.url}/v2/sandboxes", headers=api, json={"templateID": "base"}).json()
        assert made["domain"] == "boxes.test"
        token = {"X-Access-Token": made["envdAccessToken"]}
        envd = {"Host": f"49983-{made['sandboxID']}.boxes.test", **token}
        listed = httpx.post(f"{running.url}/filesystem.Filesystem/ListDir", headers=envd, json={"path": "/home"})
        assert [each["name"] for each in listed.json()["entries"]] == ["user"]
        for host, status in ((f"49983-{made['sandboxID']}.boxes.test.", 204), (f"49983-{ID}.other.test", 400)):
            assert httpx.get(f"{running.url}/health", headers={"Host": host, **token}).status_code == status
        code = {"Host": f"49999-{made['sandboxID']}.boxes.test", **token}
        assert '"text": "2"' in httpx.post(f"{running.url}/execute", headers=code, json={"code": "1+1"}).text
        assert httpx.delete(f"{running.url}/sandboxes/{made['sandboxID']}", headers=api).status_code == 204
