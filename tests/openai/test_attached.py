"""Files that came with an earlier turn are still there; none of our ids reaches an upstream; none costs too much."""

from __future__ import annotations

import base64
import json
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response
from tests.openai.conftest import CODE_INTERPRETER
from tests.openai.test_turn_containers import LIST, OUTPUTS, PNG, auto
from tests.openai.upstream import ScriptedUpstream
from tests.openai.upstream_parts import Code, Text, WaitFor

from cloche.gateway.attachments import MAX_INLINE_BYTES, MAX_INLINE_PARTS
from cloche.store.files import is_own_file_id, new_file_id


def stored(client: OpenAI, name: str = "data.csv", content: bytes = b"one") -> str:
    return client.files.create(file=(name, content), purpose="user_data").id


def message(*parts: dict, text: str = "Here is my file.") -> list[dict]:
    return [{"role": "user", "content": [*parts, {"type": "input_text", "text": text}]}]


def by_id(id: str, kind: str = "input_file") -> dict:
    return {"type": kind, "file_id": id}


INLINE = {"type": "input_file", "filename": "inline.txt", "file_data": base64.b64encode(b"inline").decode()}


@pytest.fixture(params=["chain", "conversation"])
def turn(request: pytest.FixtureRequest, client: OpenAI) -> Callable[..., Response]:
    """One turn after the other of a conversation: call it with what `responses.create` takes."""
    given = {"conversation": client.conversations.create().id} if request.param == "conversation" else {}

    def turn(**wanted) -> Response:
        answer = client.responses.create(**given, **wanted, include=OUTPUTS)
        if request.param == "chain":
            given["previous_response_id"] = answer.id
        return answer

    return turn


def test_files_of_a_turn_without_code_are_there_in_the_next(
    client: OpenAI, upstream: ScriptedUpstream, play: Callable[..., str], turn: Callable[..., Response]
):
    id = stored(client)
    model = play([Text("I see.")], [Code(f"{LIST}; print(open('data.csv').read())")], [Text("ok")])
    common = {"model": model, "tools": [CODE_INTERPRETER]}
    turn(**common, input=message(by_id(id), INLINE))
    second = turn(**common, input="What is in it?")
    assert second.output[0].outputs[0].logs == "['data.csv', 'inline.txt']\none\n"
    first_asked, second_asked = upstream.asked(model)[:2]
    for asked in (first_asked, second_asked):
        assert "The user's file data.csv is at /mnt/data/data.csv." in str(asked.body)
        assert id not in str(asked.body) and "input_file" not in str(asked.body)


def test_files_removed_by_code_stay_removed(client: OpenAI, turn: Callable[..., Response]):
    fenced = "```python\nimport os; {}; print(sorted(os.listdir('/mnt/data')))\n```"
    common = {"model": "cloche/echo", "tools": [CODE_INTERPRETER]}
    turn(**common, input=message(INLINE, by_id(stored(client))))
    second = turn(**common, input=fenced.format("os.remove('/mnt/data/inline.txt')")).output[0]
    assert second.outputs[0].logs == "['data.csv']\n"
    client.containers.files.list(second.container_id)
    assert turn(**common, input=fenced.format("pass")).output[0].outputs[0].logs == "['data.csv']\n"


def test_no_later_turn_shows_an_upstream_an_id_of_ours(
    client: OpenAI, upstream: ScriptedUpstream, turn: Callable[..., Response]
):
    id, picture, gone = stored(client, "a.pdf", b"%PDF-1.4"), stored(client, "a.png", PNG), stored(client)
    model = upstream.play("resp", [Text("1")], [Text("2")])
    parts = message(by_id(id), by_id(picture, "input_image"), by_id(gone), by_id("file-of-the-upstream"))
    turn(model=model, input=parts)
    client.files.delete(gone)
    turn(model=model, input="And?")
    for asked in upstream.asked(model):
        sent = json.dumps(asked.body)
        assert id not in sent and picture not in sent and gone not in sent and "file-of-the-upstream" in sent
        assert base64.b64encode(b"%PDF-1.4").decode() in sent and base64.b64encode(PNG).decode() in sent
    assert "is no longer there" in json.dumps(upstream.asked(model)[1].body)


def test_a_file_that_was_deleted_does_not_break_its_conversation(client: OpenAI):
    id, conversation = stored(client), client.conversations.create().id
    common = {"model": "cloche/echo", "tools": [CODE_INTERPRETER], "conversation": conversation, "include": OUTPUTS}
    client.responses.create(input=message(by_id(id)), **common)
    client.files.delete(id)
    answer = client.responses.create(input=f"```python\n{LIST}\n```", **common)
    assert answer.output[0].outputs[0].logs == "[]\n"


@pytest.mark.parametrize("tools", [[], [CODE_INTERPRETER]])
def test_a_function_output_may_be_a_stored_file(client: OpenAI, upstream: ScriptedUpstream, tools: list):
    id = stored(client)
    model = upstream.play("resp", [Text("ok")])
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    given = {"type": "function_call_output", "call_id": "call_1", "output": [by_id(id)]}
    client.responses.create(model=model, input=[call, given], tools=tools)
    (part,) = upstream.asked(model)[0].body["input"][1]["output"]
    if tools:
        assert part == {"type": "input_text", "text": "The user's file data.csv is at /mnt/data/data.csv."}
    else:
        assert part["file_data"].endswith(base64.b64encode(b"one").decode())


def test_ids_of_ours_are_told_from_others():
    assert is_own_file_id(new_file_id())
    assert not any(
        is_own_file_id(id) for id in ("file-x", "file-6F2ksmvXxt4VdoqmHRw6kL", "file-" + "é" * 22, "", "file-")
    )


# -- what a small request can cost


@pytest.mark.parametrize("tools", [[], [CODE_INTERPRETER]])
def test_one_file_in_many_parts_is_refused(client: OpenAI, tools: list):
    id = stored(client, "a.png", PNG)
    parts = [by_id(id, "input_image")] * (MAX_INLINE_PARTS + 1)
    with pytest.raises(openai.BadRequestError, match=f"in {MAX_INLINE_PARTS} parts") as refused:
        client.responses.create(model="cloche/echo", input=message(*parts), tools=tools)
    assert refused.value.param == f"input[0].content[{MAX_INLINE_PARTS}].file_id"


def test_large_files_are_refused_by_their_total_size(client: OpenAI):
    id = stored(client, "large.bin", bytes(MAX_INLINE_BYTES // 3))
    with pytest.raises(openai.BadRequestError, match=f"{MAX_INLINE_BYTES} bytes in all") as refused:
        client.responses.create(model="cloche/echo", input=message(*[by_id(id)] * 4))
    assert refused.value.param == "input[0].content[3].file_id"


def test_a_file_that_is_named_often_is_one_file(client: OpenAI):
    parts = [{**INLINE, "filename": f"{number}.txt"} for number in range(100)]
    answer = client.responses.create(
        model="cloche/echo",
        input=message(*parts, parts[0], text=f"```python\n{LIST.replace('sorted', 'len')}\n```"),
        tools=[CODE_INTERPRETER],
        include=OUTPUTS,
    )
    assert answer.output[0].outputs[0].logs == "100\n"


def test_code_that_follows_a_file_is_a_line_of_its_own(client: OpenAI):
    answer = client.responses.create(
        model="cloche/echo", input=message(INLINE, text="```python\n1\n```"), tools=[CODE_INTERPRETER]
    )
    assert answer.output[0].type == "code_interpreter_call"


# -- containers


def test_two_first_requests_of_a_session_have_their_own_files(client: OpenAI, upstream: ScriptedUpstream):
    asked, both, session = [], threading.Event(), secrets.token_hex(8)

    def code(body: dict) -> list:
        asked.append(body)
        if len(asked) == 2:
            both.set()  # until then neither has a container
        return [WaitFor(both), Code(LIST)]

    def chat(content: bytes) -> str:
        model = upstream.play("chat", code, [Text("ok")])
        file = {"filename": "data.csv", "file_data": "data:text/csv;base64," + base64.b64encode(content).decode()}
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": [{"type": "file", "file": file}]}],
            tools=[CODE_INTERPRETER],
            metadata={"session_id": session},
        )
        return str(upstream.asked(model)[1].outputs[-1])

    with ThreadPoolExecutor(2) as pool:
        said = sorted(pool.map(chat, (b"one", b"two")), key=len)
    assert "Your files are at /mnt/data/data-2.csv." in said[1] and "Your files" not in said[0]
    container = client.containers.list(limit=1).data[0]
    files = list(client.containers.files.list(container.id, order="asc"))
    contents = [client.containers.files.content.retrieve(each.id, container_id=container.id).read() for each in files]
    assert sorted(contents) == [b"one", b"two"]


def test_a_container_behind_an_id_of_litellm_is_replaced_with_its_files(client: OpenAI, expire: Callable[[str], None]):
    container = client.containers.create(name="wrapped").id
    client.containers.files.create(container, file=("kept.txt", b"kept"))
    expire(container)
    inside = f"litellm:custom_llm_provider:openai;model_id:x;container_id:{container}"
    call = {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "status": "completed", "outputs": None}
    answer = client.responses.create(
        model="cloche/echo",
        input=[
            {**call, "container_id": "cntr_" + base64.b64encode(inside.encode()).decode()},
            {"role": "user", "content": f"```python\n{LIST}\n```"},
        ],
        tools=[auto()],
        include=OUTPUTS,
    )
    assert answer.output[-2].outputs[0].logs == "['kept.txt']\n"
