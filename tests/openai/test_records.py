"""Each request leaves records that share its id: model calls, containers, executions. Who may read them, and how."""

from __future__ import annotations

import json
import secrets
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.conftest import RunningServer, serving, wait_until, with_template
from tests.openai.conftest import CODE_INTERPRETER, UPSTREAM_KEY, client_of
from tests.openai.upstream import Code, HttpError, Reached, ScriptedUpstream, StreamError, Text, Usage, WaitFor

from cloche.model import Template
from cloche.store import gateway as step_store
from cloche.store.database import Database
from cloche.store.gateway import StepQuery, StepRecord, StoredSteps

LOOP = "```python\nprint('begun', flush=True)\nwhile True: pass\n```"


class Records:
    """A server of its own, whose store the tests may read."""

    def __init__(self, server: RunningServer, place: Path):
        self.server = server
        self.place = place
        self.client = client_of(server)

    def ask(self, model: str, text: str = "?", client: openai.OpenAI | None = None, **options: Any) -> str:
        """Asks for an answer. The request's id."""
        id = f"test/{secrets.token_hex(6)}"
        options = {"tools": [CODE_INTERPRETER], "store": False, "extra_headers": {"x-request-id": id}, **options}
        (client or self.client).responses.create(model=model, input=text, **options)
        return id

    def admin(self, path: str, key: str | None = None) -> httpx2.Response:
        return httpx2.get(f"{self.server.url}/admin/{path}", headers={"x-api-key": key or self.server.key})

    def trees(self, id: str) -> list[dict[str, Any]]:
        answer = self.admin(f"requests/{id}")
        return answer.json()["requests"] if answer.is_success else []

    def tree(self, id: str) -> dict[str, Any]:
        (tree,) = self.trees(id)
        return tree

    def new_key(self, owner: str) -> str:
        asked = {"owner": owner, "role": "user"}
        url, headers = f"{self.server.url}/admin/keys", {"x-api-key": self.server.key}
        return str(httpx2.post(url, json=asked, headers=headers).json()["key"])

    def raw(self) -> bytes:
        """All that is in the store's files."""
        return b"".join(path.read_bytes() for path in self.place.glob("store.sqlite3*"))


@pytest.fixture(scope="module")
def serve(
    template: Template, gateway_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    def start(*more: str) -> Any:
        place = with_template(tmp_path_factory.mktemp("records") / "data", template)
        config = tmp_path_factory.mktemp("records") / "cloche.toml"
        config.write_text("\n".join([gateway_config.read_text(), *more]))
        return place, serving(place, env={"CLOCHE_CONFIG": str(config), "TEST_UPSTREAM_KEY": UPSTREAM_KEY})

    return start


@pytest.fixture(scope="module")
def records(serve: Callable[..., Any]) -> Iterator[Records]:
    place, starting = serve()
    with starting as server:
        yield Records(server, place)


@pytest.fixture(scope="module")
def capturing(serve: Callable[..., Any]) -> Iterator[Records]:
    place, starting = serve("[gateway]", "capture = true")
    with starting as server:
        yield Records(server, place)


def kinds(tree: dict[str, Any]) -> list[str]:
    return [step["kind"] for step in tree["steps"]]


# --- what is recorded


def test_a_turn_with_code_leaves_a_request_two_calls_a_container_and_an_execution(records: Records, play):
    model = play([Code("print(6 * 7)"), Usage(input=11, output=7, cached=3)], [Text("42"), Usage(input=20, output=5)])
    tree = records.tree(records.ask(model))
    assert sorted(kinds(tree)) == ["container", "execution", "model_call", "model_call"]
    calls = [step for step in tree["steps"] if step["kind"] == "model_call"]
    assert [(call["leg"], call["model"], call["upstream_status"]) for call in calls] == [
        (1, model, 200),
        (2, model, 200),
    ]
    assert [(call["input_tokens"], call["output_tokens"], call["cached_tokens"]) for call in calls] == [
        (11, 7, 3),
        (20, 5, 0),
    ]
    assert all(0 <= call["first_seconds"] <= call["seconds"] for call in calls)
    (container,) = [step for step in tree["steps"] if step["kind"] == "container"]
    (execution,) = [step for step in tree["steps"] if step["kind"] == "execution"]
    assert container["how"] == "created"
    assert container["container"] == execution["container"] == tree["containers"][0]
    assert execution["cpu_seconds"] >= 0
    assert execution["memory_peak_bytes"] > 0
    assert {step["outcome"] for step in tree["steps"]} == {tree["outcome"]} == {"ok"}
    sums = {name: tree[name] for name in ("model", "model_calls", "executions", "input_tokens", "output_tokens")}
    assert sums == {"model": model, "model_calls": 2, "executions": 1, "input_tokens": 31, "output_tokens": 12}


def test_steps_are_told_in_order_by_their_distance_from_the_request(records: Records):
    tree = records.tree(records.ask("cloche/echo", "```python\n1\n```\n```python\n2\n```"))
    offsets = [step["offset_seconds"] for step in tree["steps"]]
    assert offsets == sorted(offsets)
    assert max(offsets) <= tree["seconds"]
    assert tree["executions"] == 2
    assert kinds(tree).count("container") == 1


def test_a_container_that_is_used_again_is_recorded_as_such(records: Records):
    tools: Any = [CODE_INTERPRETER]
    first = records.client.responses.create(model="cloche/echo", input="```python\n1\n```", tools=tools)
    id = records.ask("cloche/echo", "```python\n1\n```", previous_response_id=first.id)
    (step,) = [step for step in records.tree(id)["steps"] if step["kind"] == "container"]
    assert (step["how"], step["container"]) == ("reused", first.output[0].container_id)


def test_a_container_that_replaces_one_that_is_gone_is_recorded_as_such(records: Records):
    tools: Any = [CODE_INTERPRETER]
    first = records.client.responses.create(model="cloche/echo", input="```python\n1\n```", tools=tools)
    records.client.containers.delete(first.output[0].container_id)
    id = records.ask("cloche/echo", "```python\n1\n```", previous_response_id=first.id)
    (step,) = [step for step in records.tree(id)["steps"] if step["kind"] == "container"]
    assert (step["how"], step["container"] == first.output[0].container_id) == ("replaced", False)


def test_a_program_that_raises_is_an_outcome_of_its_execution_and_not_of_the_request(records: Records):
    tree = records.tree(records.ask("cloche/echo", "```python\n1/0\n```"))
    assert [step["outcome"] for step in tree["steps"] if step["kind"] == "execution"] == ["raised"]
    assert tree["outcome"] == "ok"


def test_a_refusal_of_the_upstream_is_recorded_with_its_status_and_code(records: Records, play):
    refusal = {"error": {"message": "SECRET-MESSAGE", "type": "requests", "code": "rate_limit_exceeded"}}
    id = f"test/{secrets.token_hex(6)}"
    with pytest.raises(openai.RateLimitError):
        records.client.responses.create(
            model=play([HttpError(429, refusal)]), input="?", extra_headers={"x-request-id": id}
        )
    tree = records.tree(id)
    (call,) = tree["steps"]
    assert (call["outcome"], call["upstream_status"], call["error"]) == ("upstream_failed", 429, "rate_limit_exceeded")
    assert tree["outcome"] == "upstream_failed"
    assert b"SECRET-MESSAGE" not in records.raw()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_after_code_is_recorded_in_the_leg_that_failed(records: Records, play, stream: bool):
    model, id = play([Code("print(1)")], [StreamError("boom")]), f"test/{secrets.token_hex(6)}"
    options = {"tools": [CODE_INTERPRETER], "stream": stream, "extra_headers": {"x-request-id": id}}
    try:
        answer = records.client.responses.create(model=model, input="?", **options)
        for _ in answer if stream else ():
            pass
    except openai.APIError:
        pass
    tree = records.tree(id)
    outcomes = [step["outcome"] for step in tree["steps"] if step["kind"] == "model_call"]
    assert (outcomes, tree["outcome"]) == (["ok", "upstream_failed"], "upstream_failed")


def test_a_chat_completion_leaves_the_same_records(records: Records, play):
    model, id = play([Code("print(6 * 7)")], [Text("42")]), f"test/{secrets.token_hex(6)}"
    options: dict[str, Any] = {"tools": [{"type": "code_interpreter"}], "extra_headers": {"x-request-id": id}}
    records.client.chat.completions.create(model=model, messages=[{"role": "user", "content": "?"}], **options)
    tree = records.tree(id)
    assert sorted(kinds(tree)) == ["container", "execution", "model_call", "model_call"]
    assert (tree["outcome"], tree["model"], tree["model_calls"], tree["executions"]) == ("ok", model, 2, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_completion_that_fails_is_recorded_with_its_code(records: Records, play, stream: bool):
    model, id = play([Text("a"), StreamError("boom")]), f"test/{secrets.token_hex(6)}"
    options: dict[str, Any] = {"stream": stream, "extra_headers": {"x-request-id": id}}
    with pytest.raises(openai.APIError):
        answer = records.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "?"}], **options
        )
        for _ in answer:
            pass
    tree = records.tree(id)
    assert [step["outcome"] for step in tree["steps"]] == [tree["outcome"]] == ["upstream_failed"]


def test_a_client_that_leaves_while_code_runs_is_recorded_as_left(records: Records):
    id = f"test/{secrets.token_hex(6)}"
    options: dict[str, Any] = {"tools": [CODE_INTERPRETER], "store": False, "extra_headers": {"x-request-id": id}}
    with records.client.responses.create(model="cloche/echo", input=LOOP, stream=True, **options) as events:
        for event in events:
            if event.type == "response.code_interpreter_call.interpreting":
                break
    wait_until(lambda: any(tree["outcome"] == "left" for tree in records.trees(id)))
    assert [step["outcome"] for step in records.tree(id)["steps"] if step["kind"] == "execution"] == ["left"]


def test_a_request_that_goes_on_is_shown_as_far_as_it_came(records: Records, upstream: ScriptedUpstream):
    reached, go = threading.Event(), threading.Event()
    model = upstream.play("resp", [Code("1")], [Reached(reached), WaitFor(go), Text("done")])
    found: list[str] = []
    id = f"test/{secrets.token_hex(6)}"
    thread = threading.Thread(
        target=lambda: found.append(records.ask(model, extra_headers={"x-request-id": id})), daemon=True
    )
    thread.start()
    assert reached.wait(60)
    (tree,) = records.trees(id)
    assert (tree["outcome"], "execution" in kinds(tree)) == ("unfinished", True)
    go.set()
    thread.join(60)
    assert records.tree(id)["outcome"] == "ok"


# --- who may read it


def test_only_an_admin_reads_records(records: Records):
    id = records.ask("cloche/echo", "hello")
    user = records.new_key("tenant")
    for path in ("requests", f"requests/{id}"):
        assert records.admin(path, key=user).status_code == 403
        assert records.admin(path, key="e2b_" + "f" * 40).status_code == 401
        assert records.admin(path).status_code == 200


def test_an_id_that_two_owners_chose_names_both_their_requests(records: Records):
    other = client_of(records.server, api_key=records.new_key("somebody"))
    id = f"shared/{secrets.token_hex(6)}"
    for client in (records.client, other, other):
        records.ask("cloche/echo", "hello", client, extra_headers={"x-request-id": id})
    trees = records.trees(id)
    assert [tree["owner"] for tree in trees] == ["local", "somebody", "somebody"]
    assert len({tree["record"] for tree in trees}) == 3
    assert all(kinds(tree) == ["model_call"] for tree in trees)


def test_an_unknown_request_is_not_found(records: Records):
    assert records.admin("requests/nothing").status_code == 404


def test_requests_are_listed_newest_first_in_pages_and_by_filter(records: Records):
    other = client_of(records.server, api_key=records.new_key("lister"))
    ids = [records.ask("cloche/echo", "hello", other) for _ in range(3)]
    first = records.admin("requests?owner=lister&limit=2").json()
    assert [line["id"] for line in first["requests"]] == [ids[2], ids[1]]
    rest = records.admin(f"requests?owner=lister&limit=2&before={first['before']}").json()
    assert [line["id"] for line in rest["requests"]] == [ids[0]]
    assert rest["before"] is None
    assert records.admin("requests?owner=lister&outcome=upstream_failed").json()["requests"] == []
    assert all(line["outcome"] == "ok" for line in records.admin("requests?outcome=ok").json()["requests"])


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=00000000051", "before=t0", "colour=red"])
def test_a_filter_that_makes_no_sense_is_refused(records: Records, query: str):
    answer = records.admin(f"requests?{query}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


def test_the_gateway_is_counted_in_the_metrics(records: Records):
    records.ask("cloche/echo", "```python\n1\n```")
    said = httpx2.get(f"{records.server.url}/metrics").text
    counts = dict(line.rsplit(" ", 1) for line in said.splitlines() if line.startswith("cloche_gateway"))
    assert float(counts['cloche_gateway_requests_total{status="ok"}']) >= 1
    assert float(counts['cloche_gateway_model_calls_total{status="ok"}']) >= 2
    assert float(counts['cloche_gateway_executions_total{outcome="ok"}']) >= 1
    assert float(counts['cloche_gateway_tokens_total{direction="output"}']) >= 1


# --- what a user typed


def markers() -> dict[str, str]:
    return {name: f"mark{secrets.token_hex(8)}" for name in ("prompt", "code", "output", "file", "answer")}


def marked(records: Records, mark: dict[str, str], upstream: ScriptedUpstream, **options: Any) -> str:
    half = len(mark["output"]) // 2
    printed = f"print({mark['output'][:half]!r} + {mark['output'][half:]!r})"
    code = f"{mark['code']} = 1\n{printed}\nopen({mark['file'] + '.txt'!r}, 'w').close()\n"
    model = upstream.play("resp", [Code(code)], [Text(mark["answer"])])
    return records.ask(model, f"please {mark['prompt']}", instructions=f"be {mark['prompt']}", **options)


def test_without_capture_nothing_of_a_user_is_in_the_store(records: Records, upstream: ScriptedUpstream):
    mark = markers()
    id = marked(records, mark, upstream)
    assert [step["outcome"] for step in records.tree(id)["steps"]] == ["ok"] * 4
    raw = records.raw()
    assert id.encode() in raw
    assert [name for name, text in mark.items() if text.encode() in raw] == []
    assert "captured" not in records.tree(id)["steps"][0]


def test_without_capture_records_of_a_stored_response_have_nothing_of_it(records: Records, upstream: ScriptedUpstream):
    mark = markers()
    id = marked(records, mark, upstream, store=True, include=["code_interpreter_call.new_files"])
    assert records.tree(id)["outcome"] == "ok"
    with sqlite3.connect(records.place / "store.sqlite3") as db:
        rows = str(db.execute("SELECT * FROM steps").fetchall())
    assert id in rows
    assert [name for name, text in mark.items() if text in rows] == []


def test_with_capture_code_output_and_prompt_are_in_the_records(capturing: Records, upstream: ScriptedUpstream):
    mark = markers()
    tree = capturing.tree(marked(capturing, mark, upstream))
    prompt = next(step["captured"]["prompt"] for step in tree["steps"] if step.get("leg") == 1)
    ran = next(step["captured"] for step in tree["steps"] if step["kind"] == "execution")
    assert mark["prompt"] in prompt
    assert mark["code"] in ran["code"]
    assert mark["output"] in ran["output"]


def test_with_capture_the_prompt_of_a_chat_that_is_passed_on_is_in_the_records(
    capturing: Records, upstream: ScriptedUpstream
):
    id, model = f"test/{secrets.token_hex(6)}", upstream.play("chat", [Text("hello")])
    message: Any = {"role": "user", "content": "captured-words"}
    capturing.client.chat.completions.create(model=model, messages=[message], extra_headers={"x-request-id": id})
    assert "captured-words" in capturing.tree(id)["steps"][0]["captured"]["prompt"]


@pytest.mark.parametrize("more", [{}, {"background": True, "stream": True}])
def test_credentials_of_a_tool_reach_its_upstream_and_are_not_in_the_store(
    capturing: Records, upstream: ScriptedUpstream, more: dict[str, Any]
):
    secret, known = secrets.token_hex(16), secrets.token_hex(16)
    tool: Any = {"type": "mcp", "server_label": known, "server_url": "https://x.test", "authorization": secret}
    tool["headers"] = {"x-key": secret}
    found: Any = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [tool]}
    conversation = capturing.client.conversations.create(items=[found])
    model = upstream.play("resp", [Text("Yes.")])
    asked: dict[str, Any] = {"model": model, "tools": [tool], "input": [found], "conversation": conversation.id, **more}
    headers = {"authorization": f"Bearer {capturing.server.key}"}
    answer = httpx2.post(f"{capturing.server.url}/v1/responses", json=asked, headers=headers)
    assert answer.status_code == 200 and known in answer.text and secret not in answer.text
    (sent,) = upstream.asked(model)
    assert sent.body["tools"] == [tool] and sent.body["input"][-1] == found
    raw = capturing.raw()
    assert known.encode() in raw and secret.encode() not in raw


def test_captured_text_has_a_limit(capturing: Records):
    tree = capturing.tree(capturing.ask("cloche/echo", "```python\nprint('x' * 1000000)\n```" + "y" * 1000000))
    captured = [step["captured"] for step in tree["steps"] if "captured" in step]
    assert all(len(text) < 80_000 for each in captured for text in each.values())


# --- cloche logs --request


def logs(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("cloche"), "--data-dir", place, "logs", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_logs_print_a_request_as_a_tree(records: Records):
    id = records.ask("cloche/echo", "```python\nprint(1)\n```")
    head, *steps = logs(records.place, "--request", id).stdout.splitlines()
    assert head.startswith(f"request {id}  ")
    assert [line[:2] for line in steps] == ["├─", "├─", "├─", "└─"]
    assert "tokens" in head
    assert any("execution" in line and "cntr_" in line for line in steps)


def test_logs_print_a_request_as_json(capturing: Records):
    id = capturing.ask("cloche/echo", "```python\nprint('\\x1b[31m')\n```")
    told = json.loads(logs(capturing.place, "--request", id, "--json").stdout)
    assert told["requests"] == capturing.trees(id)
    assert "\x1b" not in logs(capturing.place, "--request", id).stdout


@pytest.mark.parametrize("words", [["--json"], ["--request", "x", "-f"], ["i123", "--request", "x"]])
def test_logs_refuse_options_that_do_not_go_together(words: list[str], tmp_path: Path):
    said = logs(tmp_path, *words)
    assert (said.returncode, "--request goes with" in said.stderr) == (2, True)


def test_logs_of_an_unknown_request_say_so(records: Records):
    said = logs(records.place, "--request", "nothing")
    assert (said.returncode, said.stdout) == (125, "")
    assert "no record" in said.stderr


# --- how much is kept


def step(at: float, number: int, captured: str = "") -> StepRecord:
    return StepRecord(
        id=f"t{number}",
        request="r",
        owner="o",
        kind="request",
        started_at=at,
        seconds=0.1,
        outcome="ok",
        captured={"code": captured} if captured else {},
    )


async def test_old_records_go_and_so_do_those_that_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_store, "MAX_STEPS", 3)
    monkeypatch.setattr(step_store, "MAX_CAPTURED_BYTES", 100)
    database, now = Database(tmp_path / "store.sqlite3"), time.time()
    await database.open()
    kept = StoredSteps(database)
    kept.put(step(now - step_store.STEP_KEPT_SECONDS - 60, 0))
    for number in range(1, 6):
        kept.put(step(now - 100 + number, number, captured="x" * 40))
    kept.flush()
    kept.prune_old()
    found = await kept.requests(StepQuery())
    assert [each.id for each in found] == ["t5", "t4", "t3"]
    assert [bool(each.captured) for each in found] == [True, False, False]
    await database.aclose()
