"""Keys, quotas, usage and the audit log, as an admin uses them and as others see them."""

from __future__ import annotations

import re
import time

from playwright.sync_api import Locator, Page, expect
from tests.conftest import RunningServer, wait_until
from tests.console.conftest import PATIENCE_MILLISECONDS, Visiting
from tests.console.wire import Insider, Stranger, new_key

expect.set_options(timeout=PATIENCE_MILLISECONDS)


def whoami(server: RunningServer, key: str) -> int:
    return Stranger(server).ask("GET", "/api/v1/whoami", headers={"x-api-key": key}).status


def row_of(page: Page, name: str) -> Locator:
    return page.locator("table.keys tbody tr", has_text=name)


def shown_key(page: Page) -> str:
    """The new key, which is shown this once."""
    dialog = page.get_by_role("dialog", name=re.compile("The new key"))
    dialog.wait_for()
    key = dialog.locator("code").inner_text()
    dialog.get_by_role("button", name="I have it").click()
    expect(dialog).to_be_hidden()
    return key


def test_a_key_is_made_used_rotated_and_revoked(visiting: Visiting, console: RunningServer) -> None:
    page = visiting("/keys")
    page.get_by_role("button", name="Add a key").click()
    dialog = page.get_by_role("dialog", name="Add a key")
    dialog.get_by_role("textbox", name="Name").fill("her laptop")
    dialog.get_by_role("combobox", name="Owner").fill("carol")
    dialog.get_by_role("combobox", name="Expires").select_option("30")
    dialog.get_by_role("button", name="Make the key").press("Enter")
    first = shown_key(page)
    assert first.startswith("e2b_")
    assert first not in page.content()
    assert whoami(console, first) == 200
    expect(row_of(page, "her laptop")).to_have_count(1)
    listed = Insider(console).say("GET", "/admin/keys").json()
    (record,) = [each for each in listed if each["owner"] == "carol"]
    assert (record["role"], abs(record["expires_at"] - time.time() - 30 * 86400) < 600) == ("user", True)

    row_of(page, "her laptop").get_by_role("button", name="Rotate her laptop").click()
    ask = page.get_by_role("dialog", name=re.compile("Rotate the key her laptop"))
    ask.get_by_role("button", name="Rotate").click()
    second = shown_key(page)
    assert (whoami(console, first), whoami(console, second)) == (401, 200)

    expect(row_of(page, "her laptop")).to_have_count(1)
    row_of(page, "her laptop").get_by_role("button", name="Revoke her laptop").click()
    ask = page.get_by_role("dialog", name=re.compile("Revoke the key her laptop"))
    ask.get_by_role("button", name="Revoke").click()
    expect(ask).to_be_hidden()
    assert whoami(console, second) == 401
    expect(row_of(page, "her laptop")).to_have_count(0)
    page.get_by_label("Revoked ones, too").check()
    page.wait_for_url("**revoked=1*")
    expect(row_of(page, "her laptop")).to_have_count(2)
    assert set(row_of(page, "her laptop").locator(".badge").all_inner_texts()) == {"revoked"}


def test_a_key_that_cannot_be_made_says_why_and_is_asked_for_again(visiting: Visiting) -> None:
    page = visiting("/keys")
    page.get_by_role("button", name="Add a key").click()
    dialog = page.get_by_role("dialog", name="Add a key")
    owner = dialog.get_by_role("combobox", name="Owner")
    owner.fill("not an owner")
    dialog.get_by_role("button", name="Make the key").click()
    assert not owner.evaluate("each => each.checkValidity()")
    page.evaluate("document.querySelector('#add-key form').noValidate = true")
    dialog.get_by_role("button", name="Make the key").click()
    expect(dialog.get_by_role("alert")).to_be_visible()
    assert "owner" in dialog.get_by_role("alert").inner_text()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_rotating_the_sessions_own_key_shows_the_new_one_before_logout(
    visiting: Visiting, console: RunningServer
) -> None:
    made = new_key(console, "turner", "admin", name="mine")
    page = visiting("/keys?owner=turner", made["key"])
    assert "this session" in row_of(page, "mine").inner_text()
    row_of(page, "mine").get_by_role("button", name="Rotate").click()
    dialog = page.get_by_role("dialog", name=re.compile("Rotate the key mine"))
    assert "logged in with this key" in dialog.inner_text()
    dialog.get_by_role("button", name="Rotate").click()
    new = shown_key(page)
    page.wait_for_url(re.compile(r"/ui/login\?next="))
    page.get_by_label("API key").fill(new)
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/ui/keys\?owner=turner$"))


def test_quotas_are_set_and_reset_for_owners_and_keys(visiting: Visiting, console: RunningServer) -> None:
    made = new_key(console, "dave", name="daves")
    page = visiting("/keys?owner=dave")

    def set_quota(whose: str, **amounts: str) -> Locator:
        page.get_by_role("button", name=f"Quota of {whose}", exact=True).click()
        dialog = page.get_by_role("dialog", name=re.compile("Quota of"))
        for title, amount in amounts.items():
            dialog.get_by_role("textbox", name=title.replace("_", " "), exact=True).fill(amount)
        dialog.get_by_role("button", name="Set", exact=True).click()
        return dialog

    expect(set_quota("dave", Sandboxes_at_once="3", Memory="8GiB")).to_be_hidden()
    expect(page.locator(".owner-head").get_by_text("3 sandboxes")).to_be_visible()
    expect(page.locator(".owner-head").get_by_text("8.0 GiB memory")).to_be_visible()
    expect(set_quota("daves", Executions_per_minute="2")).to_be_hidden()
    expect(row_of(page, "daves").get_by_text("2 executions/min")).to_be_visible()
    own = {"x-api-key": made["key"]}
    told = Stranger(console).ask("GET", "/api/v1/usage", headers=own).json()
    assert told["quota"]["sandboxes"] == 3

    dialog = set_quota("dave", Memory="much")
    expect(dialog.get_by_role("alert")).to_contain_text("much is neither a number")
    dialog.get_by_role("button", name="Reset to defaults").click()
    expect(dialog).to_be_hidden()
    expect(page.locator(".owner-head").get_by_text("no quota")).to_be_visible()


def test_a_user_sees_their_own_keys_and_usage_and_can_change_nothing(
    visiting: Visiting, console: RunningServer
) -> None:
    made, other = new_key(console, "erin", name="erins"), new_key(console, "frank", name="franks")
    page = visiting("/keys", made["key"])
    assert row_of(page, "erins").count() == 1
    assert other["id"] not in page.content()
    assert "frank" not in page.content()
    assert page.locator("table.keys button, [data-add-key]").count() == 0
    page.get_by_role("link", name="Usage", exact=True).click()
    assert page.locator("section.owner h2").all_inner_texts() == ["erin"]
    assert page.get_by_role("link", name="Audit log").count() == 0
    user = Insider(console, made["key"])
    assert user.page("/audit").status == 403
    assert user.page("/audit/verdict").status == 403
    assert user.say("POST", "/admin/keys", {"owner": "erin", "role": "admin"}).status == 403
    for path in ("/keys?owner=frank", "/usage?owner=frank", "/requests?owner=frank"):
        assert "franks" not in user.page(path).text


def test_usage_shows_consumption_and_quota(visiting: Visiting, console: RunningServer) -> None:
    made, admin = new_key(console, "gail", name="gails"), Insider(console)
    assert admin.say("PUT", "/admin/quotas/gail", {"sandboxes": 1}).status in (200, 204)
    own = {"x-api-key": made["key"]}
    id = admin.ask("POST", "/api/v1/sandboxes", {}, own).json()["id"]
    assert admin.ask("POST", f"/api/v1/sandboxes/{id}/run", {"code": "sum(range(10**6))"}, own).status == 200
    page = visiting("/usage")
    section = page.locator("section.owner", has=page.get_by_role("heading", name="gail"))
    assert "1 of 1" in section.locator(".meters").inner_text()
    assert "used up" in section.locator(".meters").inner_text()
    assert "1 executions" in section.inner_text()
    chart = section.get_by_role("img", name=re.compile("^Executions of gail in the last hour: 1 in all"))
    assert chart.locator("rect").count() == 1
    admin.ask("DELETE", f"/api/v1/sandboxes/{id}", None, own)


def test_the_audit_log_is_filtered_and_its_chain_verified(visiting: Visiting, console: RunningServer) -> None:
    made = new_key(console, "holly", name="hollys")
    assert Insider(console).say("DELETE", f"/admin/keys/{made['id']}").status == 204
    page = visiting("/audit?owner=holly")
    assert page.locator("table.audit tbody tr strong").all_inner_texts()[:2] == ["key.revoked", "key.made"]
    page.get_by_role("combobox", name="What").fill("key.revoked")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**what=key.revoked*")
    assert page.locator("table.audit tbody tr strong").all_inner_texts() == ["key.revoked"]
    page.get_by_role("button", name="Verify the chain").click()
    expect(page.locator("#verdict")).to_contain_text("chain verified")
    page.goto("/ui/audit?what=console")
    wait_until(lambda: "console.login" in Insider(console).page("/audit?what=console.login").text)
    assert Insider(console).page("/audit?since=never").status == 400
    assert Insider(console).page("/audit?page=0").status == 400
