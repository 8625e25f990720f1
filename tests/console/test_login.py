"""In and out of the console, and what a stranger finds there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from playwright.sync_api import Browser
from tests.conftest import RunningServer, serving, with_template
from tests.console.conftest import Visiting
from tests.console.wire import CSRF, HTML, Insider, Stranger, csrf_of, data_dir_of, new_key, path_of
from tests.tenants.routes import WEBSOCKET, Known, all_routes

from cloche.api.console.login import FREE_FAILURES, SECONDS_PER_LOGIN, LoginThrottle, TooManyLogins, safe_page
from cloche.api.console.sessions import (
    IDLE_SECONDS,
    LINK_SECONDS,
    MAX_SESSION_SECONDS,
    MAX_SESSIONS_OF_OWNER,
    ConsoleSessions,
)
from cloche.model import Principal, Template
from cloche.store.database import Database
from cloche.store.keys import StoredKeys

ADMIN = Principal(owner="local", role="admin")
OPEN = {"/ui", "/ui/login", "/ui/login/state", "/ui/static/{name:path}"}  # to everybody
UNSAFE = {"POST", "PUT", "PATCH", "DELETE"}


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> list[Known]:
    """Of the console, and of the dialects that its scripts speak."""
    found = all_routes(tmp_path_factory.mktemp("routes"))
    return [each for each in found if each.plane in ("ui", "api", "v1", "admin")]


@pytest.fixture(scope="module")
def admin(console: RunningServer) -> Insider:
    return Insider(console)


def new_link(console: RunningServer) -> str:
    """As `cloche ui` prints it."""
    command = [Path(sys.executable).with_name("cloche"), "--data-dir", data_dir_of(console), "ui"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# --- in


def test_a_link_logs_in_once_and_leaves_no_trace_in_the_address(browser: Browser, console: RunningServer) -> None:
    link = new_link(console)
    assert link.startswith(f"{console.url}/ui/login#")
    first, second = browser.new_context(), browser.new_context()
    page = first.new_page()
    page.goto(link)
    page.wait_for_url(f"{console.url}/ui/")
    assert page.locator("h1").inner_text() == "Welcome"
    assert link.partition("#")[2] not in page.evaluate(
        "JSON.stringify([location.href, history.length, document.referrer])"
    )
    (cookie,) = first.cookies()
    assert (cookie["name"], cookie["path"], cookie["httpOnly"], cookie["sameSite"]) == (
        "cloche_session", "/ui", True, "Strict",
    )  # fmt: skip
    assert page.evaluate("document.cookie") == ""
    again = second.new_page()
    again.goto(link)
    again.get_by_role("alert").wait_for()
    assert "used already" in again.get_by_role("alert").inner_text()
    assert not second.cookies()
    first.close()
    second.close()


def test_login_with_a_key_leads_to_the_wanted_page_and_logout_works(browser: Browser, console: RunningServer) -> None:
    context = browser.new_context(base_url=console.url)
    page = context.new_page()
    page.goto("/ui/keys?owner=local")
    assert page.url == f"{console.url}/ui/login?next=/ui/keys%3Fowner%3Dlocal"
    page.get_by_label("API key").fill("e2b_wrong")
    page.keyboard.press("Enter")
    assert "not known here" in page.get_by_role("alert").inner_text()
    page.get_by_label("API key").fill(console.key)
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/keys?owner=local")
    kept = context.cookies()
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/ui/login")
    assert not context.cookies()
    context.add_cookies(kept)  # type: ignore[arg-type]  # they are what it gave
    page.goto("/ui/keys")
    assert page.url.startswith(f"{console.url}/ui/login")
    context.close()


def test_a_logged_in_user_is_redirected_past_the_login_page(visiting: Visiting, console: RunningServer) -> None:
    page = visiting("/login?next=/ui/usage")
    page.wait_for_url(f"{console.url}/ui/usage")
    assert page.locator(".who").inner_text().split()[-2:] == ["local", "admin"]


def test_a_login_link_replaces_an_existing_session(visiting: Visiting, console: RunningServer) -> None:
    page = visiting("/keys", key=new_key(console, "modest")["key"])
    assert "modest" in page.locator(".who").inner_text()
    link = new_link(console)
    page.goto(link)
    page.wait_for_url(f"{console.url}/ui/")
    assert page.locator(".who").inner_text().split()[-2:] == ["local", "admin"]


def test_a_session_that_ended_says_so_and_is_taken_up_where_it_was(
    visiting: Visiting, console: RunningServer, admin: Insider
) -> None:
    first, second = new_key(console, "returning"), new_key(console, "returning")
    page = visiting("/sandboxes?state=running", key=first["key"])
    assert admin.say("DELETE", f"/admin/keys/{first['id']}").status in (200, 204)
    page.wait_for_url("**/ui/login?next=/ui/sandboxes%3Fstate%3Drunning")  # it asks by itself
    assert "has ended" in page.get_by_role("status").first.inner_text()
    page.get_by_label("API key").fill(second["key"])
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/sandboxes?state=running")


def test_a_cookie_is_for_the_console_alone_and_for_tls_where_that_is_spoken(console: RunningServer) -> None:
    stranger = Stranger(console)
    plain = stranger.send("/ui/login", {"key": console.key}).header("set-cookie")
    assert {each.strip().lower() for each in plain.split(";")[1:]} == {
        "httponly", f"max-age={int(MAX_SESSION_SECONDS)}", "path=/ui", "samesite=strict",
    }  # fmt: skip
    https = {"origin": f"https://{stranger.place}"}
    behind_tls = stranger.send("/ui/login", {"key": console.key}, https).header("set-cookie")
    assert behind_tls.startswith("__Host-cloche_session=")  # which no site of a neighbour, a sandbox's say, can plant
    assert {each.strip().lower() for each in behind_tls.split(";")[1:]} == {
        "httponly", f"max-age={int(MAX_SESSION_SECONDS)}", "path=/", "samesite=strict", "secure",
    }  # fmt: skip


def test_a_second_login_of_a_browser_ends_its_first_session(console: RunningServer) -> None:
    first = Insider(console)
    entered = first.send("/ui/login", {"key": console.key}, {"cookie": first.cookie})
    assert entered.status == 303
    assert first.page("/").status == 303  # to the login page
    assert first.say("GET", "/api/v1/whoami").status == 401


def test_wrong_keys_slow_down_the_guessing_client_only(console: RunningServer) -> None:
    guesser = Stranger(console, "127.0.0.2")
    told = [guesser.send("/ui/login", {"key": f"e2b_{n}"}) for n in range(FREE_FAILURES)]
    assert {each.status for each in told} == {401}
    while told[-1].status == 401:  # on a slow machine, some of it is forgotten meanwhile
        told.append(guesser.send("/ui/login", {"key": "e2b_wrong"}))
    assert told[-1].status == 429
    assert 1 <= int(told[-1].header("retry-after")) <= SECONDS_PER_LOGIN
    assert "try again in" in told[-1].text
    assert Stranger(console).send("/ui/login", {"key": console.key}).status == 303


def test_failed_attempts_are_forgotten_after_a_while() -> None:
    now = [0.0]
    throttle = LoginThrottle(lambda: now[0])
    for _ in range(FREE_FAILURES):
        throttle.failed("a")
    with pytest.raises(TooManyLogins):
        throttle.check("a")
    now[0] += SECONDS_PER_LOGIN
    throttle.check("a")
    throttle.failed("a")
    with pytest.raises(TooManyLogins):
        throttle.check("a")
    now[0] += FREE_FAILURES * SECONDS_PER_LOGIN
    for _ in range(FREE_FAILURES - 1):
        throttle.failed("a")
    throttle.check("a")


# --- how long it lasts


def test_a_link_is_good_for_a_quarter_of_an_hour(tmp_path: Path) -> None:
    now, sessions = _sessions(tmp_path)
    late, soon = sessions.new_link(), sessions.new_link()
    assert sessions.follow(soon, ADMIN) is not None
    assert sessions.follow(soon, ADMIN) is None
    now[0] += LINK_SECONDS + 1
    assert sessions.follow(late, ADMIN) is None
    assert sessions.follow("never-made", ADMIN) is None


def test_a_session_ends_when_unused_and_after_a_day_in_any_case(tmp_path: Path) -> None:
    now, sessions = _sessions(tmp_path)
    used, idle, alone = (_entered(sessions) for _ in range(3))
    for _ in range(int(MAX_SESSION_SECONDS // (IDLE_SECONDS / 2))):
        assert sessions.find(used) is not None
        sessions.find(alone, away=True)  # a page asks by itself, and nobody is there
        now[0] += IDLE_SECONDS / 2
    assert sessions.find(idle) is None
    assert sessions.find(alone) is None
    assert sessions.find(used) is not None
    now[0] += 1
    assert sessions.find(used) is None


def test_one_owner_has_so_many_sessions_and_no_more(tmp_path: Path) -> None:
    _, sessions = _sessions(tmp_path)
    tokens = [_entered(sessions) for _ in range(MAX_SESSIONS_OF_OWNER)]
    sessions.find(tokens[0])
    tokens.append(_entered(sessions))
    assert len(sessions) == MAX_SESSIONS_OF_OWNER
    assert [each for each in tokens if sessions.find(each) is None] == [tokens[1]]  # the longest unused


def test_a_session_ends_with_its_key(console: RunningServer, admin: Insider) -> None:
    key = new_key(console, "leaver")
    leaver = Insider(console, key["key"])
    assert leaver.page("/keys").status == 200
    assert admin.say("DELETE", f"/admin/keys/{key['id']}").status == 204
    assert leaver.page("/keys").status == 303
    assert leaver.say("GET", "/api/v1/whoami").status == 401
    assert leaver.open("/ui/api/v1/sandboxes/x/contexts/y", {"cookie": leaver.cookie, "origin": console.url}) == 401


def test_open_streams_end_with_their_session_and_its_key(console: RunningServer, admin: Insider) -> None:
    """A run of a minute, which is followed, in another window."""
    for ends in ("logout", "another login", "revoked"):
        key = new_key(console, "follower")
        follower = Insider(console, key["key"])
        id = follower.say("POST", "/api/v1/sandboxes", {}).json()["id"]
        with ThreadPoolExecutor(1) as window:
            code = {"code": "print('begun', flush=True)\nimport time\ntime.sleep(60)"}
            followed = window.submit(follower.cut_short, f"/api/v1/sandboxes/{id}/stream", code, begun := Event())
            assert begun.wait(30)
            if ends == "logout":
                assert follower.send("/ui/logout", {"csrf": follower.csrf}, {"cookie": follower.cookie}).status == 303
            elif ends == "another login":
                assert follower.send("/ui/login", {"key": key["key"]}, {"cookie": follower.cookie}).status == 303
            else:
                assert admin.say("DELETE", f"/admin/keys/{key['id']}").status == 204
            assert followed.result(30)
        assert admin.say("DELETE", f"/api/v1/sandboxes/{id}").status in (200, 204)


def _sessions(place: Path) -> tuple[list[float], ConsoleSessions]:
    """With a clock that stands still."""
    now = [1000.0]
    return now, ConsoleSessions(StoredKeys(Database(place / "store.sqlite3")), lambda: now[0])


def _entered(sessions: ConsoleSessions) -> str:
    token = sessions.follow(sessions.new_link(), ADMIN)
    assert token is not None
    return token


# --- strangers


def test_without_a_login_there_is_nothing_but_the_login_page(console: RunningServer, routes: list[Known]) -> None:
    stranger, key = Stranger(console), {"x-api-key": console.key}
    closed = [each for each in routes if each.method != WEBSOCKET and not (each.plane == "ui" and each.path in OPEN)]
    assert len(closed) > 100
    for route in closed:
        path, expected = path_of(route), 404 if route.path == "/ui/login/links" else 401
        for headers in ({}, key, {"cookie": "cloche_session=made-up"}):
            answer = stranger.ask(route.method, path, headers={**headers, "origin": console.url})
            assert answer.status == expected, (route, headers, answer)
        led = stranger.ask(route.method, path, headers=HTML)
        assert (led.status, led.header("location")[:14]) == (303, "/ui/login?next") or expected == 404, (route, led)
        assert not led.body or expected == 404
    sockets = [each for each in routes if each.method == WEBSOCKET]
    assert sockets
    for route in sockets:
        for headers in ({}, key):
            assert stranger.open(path_of(route), {**headers, "origin": console.url}) == 401, route


def test_strangers_see_no_name_of_anything(console: RunningServer) -> None:
    stranger = Stranger(console)
    login = stranger.ask("GET", "/ui/login", headers=HTML)
    assert login.status == 200
    assert csrf_of(login) == ""
    assert "Sandboxes" not in login.text
    absent = stranger.ask("GET", "/ui/no-such-page", headers=HTML)
    assert (absent.status, "Sandboxes" in absent.text) == (404, False)
    assert stranger.ask("GET", "/ui/login/state").json() == {"logged_in": False}
    for name in ("x" * 300 + ".js", "../app.txt", "%2e%2e/app.txt", "v-1/../../x.js", "/etc/os-release.txt", "a%00.js"):
        assert stranger.ask("GET", f"/ui/static/{name}").status == 404


def test_a_page_whose_session_has_ended_leads_to_the_login_and_back(console: RunningServer) -> None:
    """When htmx asks for a part of it."""
    places = {"/ui/requests?owner=a": "/ui/requests%3Fowner%3Da", "/evil": "/ui/", "": "/ui/", "/ui/x%[": "/ui/"}
    for page, wanted in places.items():
        sent = {"hx-request": "true", "hx-current-url": f"{console.url}{page}#x"}
        answer = Stranger(console).ask("GET", "/ui/usage", headers=sent)
        assert (answer.status, answer.header("hx-redirect")) == (401, f"/ui/login?next={wanted}")
    strange = Stranger(console).ask(
        "GET", "/ui/usage", headers={"hx-request": "true", "hx-current-url": "http://[/ui/"}
    )
    assert (strange.status, strange.header("hx-redirect")) == (401, "/ui/login?next=/ui/")


def test_two_cookies_of_one_name_are_none(console: RunningServer, admin: Insider) -> None:
    """Whoever has another port, or a name below ours, can add one of theirs, but cannot see ours."""
    for cookies in (f"cloche_session=theirs; {admin.cookie}", f"{admin.cookie}; cloche_session=theirs"):
        assert admin.say("GET", "/api/v1/whoami", cookie=cookies).status == 401
    assert admin.say("GET", "/api/v1/whoami", cookie=f"other=1; {admin.cookie}; more=2").status == 200


def test_a_cookie_that_a_neighbour_planted_neither_logs_in_nor_out(template: Template, tmp_path: Path) -> None:
    """A page of a sandbox, at a name below the console's, has a session of its own: whoever sent it wants it used."""
    place = with_template(tmp_path / "data", template)
    with serving(place, "--public-url", "https://console.example") as running:
        stranger, planted = Stranger(running), Insider(running).cookie
        public = {"host": "console.example"}
        entered = stranger.send("/ui/login", {"key": running.key}, {**public, "origin": "https://console.example"})
        own = entered.header("set-cookie").partition(";")[0]

        def state(*cookies: str, **more: str) -> object:
            headers = {"cookie": "; ".join(cookies), **more}
            return stranger.ask("GET", "/ui/login/state", headers=headers).json()["logged_in"]

        assert state(own, **public)
        assert state(planted, own, **public)
        assert not state(planted, **public)
        assert state(planted)  # by the address at which it is plain
        assert not state(own, own.replace("=", "=x"), **public)


# --- other sites


def test_no_other_site_can_do_anything_with_a_session(
    console: RunningServer, admin: Insider, routes: list[Known]
) -> None:
    unsafe = [each for each in routes if each.method in UNSAFE and each.path not in ("/ui/login", "/ui/login/links")]
    assert len(unsafe) > 60
    foreign = (
        {CSRF: ""},
        {CSRF: "0" * len(admin.csrf)},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": f"http://evil.{admin.place}"},
        {"origin": f"{console.url}.evil.example"},
        {"origin": "", "sec-fetch-site": "cross-site"},
        {"origin": "", "sec-fetch-site": "same-site"},
    )
    for route in unsafe:
        for headers in foreign:
            own = {"cookie": admin.cookie, CSRF: admin.csrf, "origin": console.url}
            sent = {name: value for name, value in {**own, **headers}.items() if value}
            answer = admin.ask(route.method, path_of(route), {}, sent)
            assert answer.status == 403, (route, headers, answer)
    assert admin.page("/").status == 200  # nobody was logged out


def test_a_form_of_another_site_logs_no_user_in_or_out(console: RunningServer, admin: Insider) -> None:
    for origin in ("https://evil.example", "null"):
        assert admin.send("/ui/login", {"key": console.key}, {"origin": origin}).status == 403
        fields, sent = {"csrf": admin.csrf}, {"origin": origin, "cookie": admin.cookie}
        assert admin.send("/ui/logout", fields, sent).status == 403
    assert admin.send("/ui/logout", {"csrf": "wrong"}, {"cookie": admin.cookie}).status == 403
    assert admin.page("/").status == 200


def test_another_site_can_neither_read_nor_open_a_websocket(
    console: RunningServer, admin: Insider, routes: list[Known]
) -> None:
    for site in ("cross-site", "same-site"):
        assert admin.say("GET", "/api/v1/whoami", sec_fetch_site=site).status == 403
    for route in (each for each in routes if each.method == WEBSOCKET):
        for origin in ({"origin": "https://evil.example"}, {"origin": "null"}, {}):
            assert admin.open(path_of(route), {"cookie": admin.cookie, **origin}) == 403, (route, origin)


@pytest.mark.parametrize(
    "wanted",
    [
        "https://evil.example/",
        "//evil.example/",
        "/\\evil.example",
        "/ui//evil.example",
        "/ui/../../evil",
        "/ui/%2E%2e/%2e./evil",
        "/ui/\\\\evil.example",
        "javascript:alert(1)",
        "/ui/login",
        "/ui/logout",
        "/api/v1/sandboxes",
        "/ui/keys\r\nset-cookie: a=b",
        "/ui/" + "a" * 1000,
        "",
    ],
)
def test_a_login_leads_nowhere_but_to_a_page_of_the_console(console: RunningServer, wanted: str) -> None:
    entered = Stranger(console).send("/ui/login", {"key": console.key, "next": wanted})
    assert (entered.status, safe_page(wanted)) == (303, "/ui/")
    assert entered.header("location") == "/ui/"
    assert entered.header("set-cookie").startswith("cloche_session=")


# --- what a browser is told


def test_every_answer_forbids_shared_caching(console: RunningServer, admin: Insider) -> None:
    pages = [admin.page(path) for path in ("/", "/keys", "/requests", "/no-such-page")]
    pages.append(Stranger(console).ask("GET", "/ui/login", headers=HTML))
    for page in pages:
        policy = page.header("content-security-policy")
        assert "default-src 'none'" in policy
        assert f"script-src {admin.place}/ui/static/;" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert page.header("cache-control") == "no-store"
    (script,) = re.findall(r'src="(/ui/static/[^"]+/console\.js)"', pages[0].text)
    said = [*pages, admin.say("GET", "/api/v1/whoami"), Stranger(console).ask("GET", script)]
    for answer in said:
        assert answer.header("x-content-type-options") == "nosniff"
        assert answer.header("cross-origin-opener-policy") == "same-origin"
        assert answer.header("referrer-policy") == "same-origin"
    assert said[-2].header("content-security-policy").startswith("sandbox; default-src 'none'")
    assert "immutable" in said[-1].header("cache-control")


def test_a_sandbox_file_opened_as_a_page_has_no_rights(admin: Insider) -> None:
    id = admin.say("POST", "/api/v1/sandboxes", {}).json()["id"]
    path = f"/api/v1/sandboxes/{id}/files/content?path=/mnt/data/page.html"
    assert admin.say("PUT", path, b"<script>top.location = '/ui/keys'</script>").status in (200, 201, 204)
    answer = admin.say("GET", path)
    made = admin.say("POST", "/v1/containers", {"name": "c"}).json()["id"]
    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="p.html"\r\n\r\n<script></script>\r\n--x--\r\n'
    )
    put = admin.say("POST", f"/v1/containers/{made}/files", form, content_type="multipart/form-data; boundary=x")
    other = admin.say("GET", f"/v1/containers/{made}/files/{put.json()['id']}/content")
    for each in (answer, other):
        assert (each.status, each.header("x-content-type-options")) == (200, "nosniff")
        assert each.header("content-security-policy") == "sandbox; default-src 'none'; frame-ancestors 'self'"
    assert admin.say("DELETE", f"/v1/containers/{made}").status == 200
    assert admin.say("DELETE", f"/api/v1/sandboxes/{id}").status in (200, 204)


# --- who is who


def test_an_admin_at_the_console_sees_others_sandboxes_and_an_admins_key_does_not(
    console: RunningServer, admin: Insider
) -> None:
    owner, other = (new_key(console, name)["key"] for name in ("maker", "other"))
    chief = new_key(console, "chief", "admin")["key"]
    id = admin.ask("POST", "/api/v1/sandboxes", {}, {"x-api-key": owner}).json()["id"]
    path = f"/api/v1/sandboxes/{id}"
    assert Insider(console, owner).say("GET", path).status == 200
    assert Insider(console, chief).say("GET", path).status == 200
    assert Insider(console, other).say("GET", path).status == 404
    assert admin.ask("GET", path, headers={"x-api-key": chief}).status == 404
    every = "/api/v1/sandboxes?all=true"
    assert admin.ask("GET", every, headers={"x-api-key": chief}).status == 403
    assert Insider(console, other).say("GET", every).status == 403
    assert id in Insider(console, chief).say("GET", every).text
    assert Insider(console, other).say("GET", "/admin/keys").status == 403
    assert admin.say("DELETE", path).status in (200, 204)


# --- a server without keys


@pytest.fixture(scope="module")
def keyless(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(with_template(tmp_path_factory.mktemp("keyless") / "data", template), "--insecure-no-auth") as running:
        yield running


def test_without_keys_the_console_is_open_to_this_machine_and_to_no_web_page(keyless: RunningServer) -> None:
    visitor = Stranger(keyless)
    start = visitor.ask("GET", "/ui/", headers=HTML)
    assert start.status == 200
    assert "Log out" not in start.text
    for headers in (
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"x-forwarded-for": "203.0.113.1"},
    ):
        for path in ("/ui/", "/ui/keys", "/ui/api/v1/sandboxes", "/ui/admin/keys"):
            assert visitor.ask("GET", path, headers=headers).status == 403, (path, headers)
    own, token = {"origin": keyless.url}, {CSRF: csrf_of(start)}
    assert visitor.ask("POST", "/ui/admin/keys", {}, own).status == 403
    assert visitor.ask("POST", "/ui/admin/keys", {}, {**token, "origin": "https://evil.example"}).status == 403
    assert visitor.ask("POST", "/ui/admin/keys", {}, {**own, **token}).status == 201
    told = keyless.process.stdout.readline() if keyless.process.stdout else ""
    assert told == f"console {keyless.url}/ui/\n"
