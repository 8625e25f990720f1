"""What is done at the console leaves the same trail as what is done with a key."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from tests.conftest import RunningServer, wait_until
from tests.console.wire import HTML, Insider, data_dir_of, new_key

from cloche.api.console.context import MAX_REMEMBERED_READS, REPEAT_SECONDS, AdminReadAudit, ConsolePage, ConsoleVisitor
from cloche.model import Principal
from cloche.store.audit import AuditLine
from cloche.store.audit_reader import AuditQuery, read_last


def lines(console: RunningServer, owner: str) -> list[AuditLine]:
    return read_last(data_dir_of(console) / "audit", AuditQuery(owner=owner), 1000)


def test_console_actions_are_audited_like_actions_with_a_key(console: RunningServer) -> None:
    admin = Insider(console, new_key(console, "tail-admin", "admin")["key"])
    user = Insider(console, new_key(console, "tail-user")["key"])
    assert admin.say("GET", "/admin/keys").status == 200
    assert admin.say("GET", "/admin/requests").status == 200
    assert user.say("POST", "/v1/responses", {"model": "cloche/echo", "input": "hello"}).status == 200
    assert user.say("GET", "/admin/keys").status == 403

    def whole() -> bool:
        said = {
            (each.what, each.by, each.outcome or "")
            for name in ("tail-admin", "tail-user")
            for each in lines(console, name)
        }
        return said >= {
            ("admin.keys.read", "tail-admin", ""),
            ("admin.requests.read", "tail-admin", ""),
            ("gateway.responses.made", "tail-user", ""),
            ("request.refused", "tail-user", "403"),
        }

    wait_until(whole, 10)


@pytest.mark.parametrize("headers", [HTML, {"hx-request": "true"}], ids=["page", "part"])
def test_an_admins_view_of_foreign_data_is_audited(console: RunningServer, headers: dict[str, str]) -> None:
    owner = f"looks-{len(headers.get('accept', ''))}"
    admin = Insider(console, new_key(console, owner, "admin")["key"])
    for path in ("/sandboxes", "/requests", "/network", "/keys", "/usage", "/audit", "/templates", "/health"):
        for _ in range(3):
            answer = admin.ask("GET", f"/ui{path}", headers={**headers, "cookie": admin.cookie})
            assert answer.status == 200

    def told() -> list[str]:
        return sorted(each.what for each in lines(console, owner) if each.what.startswith("admin."))

    nouns = ("audit", "keys", "network", "requests", "sandboxes", "templates", "usage")
    wait_until(lambda: told() == [f"admin.{each}.read" for each in nouns], 10)


def test_a_page_that_asks_every_second_is_told_of_now_and_then() -> None:
    now, heard = [0.0], list[str]()
    looks = AdminReadAudit(lambda what, owner, **about: heard.append(what), lambda: now[0])
    admin = ConsoleVisitor(Principal(owner="a", role="admin"), "session")

    async def nothing(request: Request, visitor: ConsoleVisitor) -> None: ...

    def look(visitor: ConsoleVisitor, id: str = "") -> int:
        params = {"id": id} if id else {}
        request = Request({"type": "http", "method": "GET", "path": "/", "headers": [], "path_params": params})
        looks.record(request, visitor, ConsolePage("/sandboxes/{id}", nothing))  # type: ignore[arg-type]
        return len(heard)

    assert [look(admin), look(admin), look(admin, "x"), look(admin._replace(csrf="other"))] == [1, 1, 2, 3]
    assert look(ConsoleVisitor(Principal(owner="u", role="user"), "theirs")) == 3
    now[0] = REPEAT_SECONDS
    assert look(admin) == 4
    for number in range(MAX_REMEMBERED_READS + 10):
        look(admin, f"i{number}")
    assert len(looks._told) == MAX_REMEMBERED_READS
