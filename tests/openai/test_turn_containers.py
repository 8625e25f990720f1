"""Where code runs and what it has there: containers that are found, made, replaced; files that come with a request,
files that an answer cites."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable

import httpx2
import openai
import pytest
from openai import OpenAI
from tests.conftest import RunningServer
from tests.openai.conftest import CODE_INTERPRETER
from tests.openai.upstream import ScriptedUpstream
from tests.openai.upstream_parts import Code, Text, WaitFor

from cloche.gateway.turn_container import candidate_link_ends

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
LIST = "import os; print(sorted(os.listdir('/mnt/data')))"
OUTPUTS = ["code_interpreter_call.outputs"]


def auto(**wishes) -> dict:
    return {"type": "code_interpreter", "container": {"type": "auto", **wishes}}


def description(asked) -> str:
    tool = asked.body["tools"][-1]
    return tool.get("function", tool)["description"]


def annotations(answer) -> list:
    return answer.output[-1].content[0].annotations


# -- citations


def test_a_linked_file_is_cited_where_it_is_linked_and_can_be_fetched(client: OpenAI, play: Callable[..., str]):
    text = (
        "See [data](sandbox:/mnt/data/my data (1).csv), [again](sandbox:/mnt/data/my%20data%20(1).csv) and\n"
        "- sandbox:/mnt/data/d/x.txt."
    )
    code = "import os; os.mkdir('d'); open('d/x.txt','w').write('x'); open('my data (1).csv','w').write('a,b')"
    answer = client.responses.create(model=play([Code(code)], [Text(text)]), input="?", tools=[CODE_INTERPRETER])
    first, second, third = annotations(answer)
    spans = [text[each.start_index : each.end_index] for each in (first, second, third)]
    assert spans == [
        "sandbox:/mnt/data/my data (1).csv",
        "sandbox:/mnt/data/my%20data%20(1).csv",
        "sandbox:/mnt/data/d/x.txt",
    ]
    assert first.filename == "my data (1).csv" and first.file_id == second.file_id
    content = client.containers.files.content.retrieve(third.file_id, container_id=third.container_id)
    assert content.read() == b"x"


@pytest.mark.parametrize("path", ["../../etc/passwd", "link", "linked/passwd", "pipe", "d", "nothing", "d/../../x"])
def test_only_regular_files_below_mnt_data_are_cited(client: OpenAI, upstream: ScriptedUpstream, path: str):
    code = "import os; os.symlink('/etc/passwd','link'); os.symlink('/etc','linked'); os.mkfifo('pipe'); os.mkdir('d')"
    model = upstream.play("chat", [Code(code)], [Text(f"[x](sandbox:/mnt/data/{path})")])
    answer = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER])
    assert annotations(answer) == []


def test_a_shown_picture_is_cited_and_kept_and_no_file_inside(
    client: OpenAI, upstream: ScriptedUpstream, expire: Callable[[str], None]
):
    show = f"from IPython.display import Image, display; display(Image({PNG!r}))"
    model = upstream.play("resp", [Code(f"{show}\n{LIST}")], [Text("There.")])
    answer = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER], include=OUTPUTS)
    (cited,) = annotations(answer)
    assert (cited.start_index, cited.end_index, cited.filename) == (0, 0, f"{cited.file_id}.png")
    assert "[]" in answer.output[0].outputs[-1].logs
    (listed,) = client.containers.files.list(cited.container_id)
    assert (listed.id, listed.bytes) == (cited.file_id, len(PNG))
    expire(cited.container_id)
    content = client.containers.files.content.retrieve(cited.file_id, container_id=cited.container_id)
    assert content.read() == PNG


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("[a](sandbox:/mnt/data/a.csv)", ["/mnt/data/a.csv"]),
        (
            "[a](sandbox:/mnt/data/a (1).csv) and (b)",
            ["/mnt/data/a (1).csv", "/mnt/data/a (1).csv) and (b", "/mnt/data/a"],
        ),
        ("[a](<sandbox:/mnt/data/a b.csv>)", ["/mnt/data/a b.csv", "/mnt/data/a"]),
        ("It is sandbox:/mnt/data/a.csv.", ["/mnt/data/a.csv.", "/mnt/data/a.csv"]),
        ("`sandbox:/mnt/data/a.csv`", ["/mnt/data/a.csv"]),
    ],
)
def test_readings_of_a_link(text: str, paths: list[str]):
    start = text.index("sandbox:")
    assert [text[start + 8 : end] for end in candidate_link_ends(text, start, start + 8)] == paths


# -- files of the request


def test_the_files_of_the_tool_are_there_and_the_model_knows(
    client: OpenAI, upstream: ScriptedUpstream, play: Callable[..., str]
):
    ids = [client.files.create(file=("data.csv", each), purpose="user_data").id for each in (b"one", b"two")]
    model = play([Code("print(open('data.csv').read(), open('/mnt/data/data-2.csv').read())")], [Text("ok")])
    answer = client.responses.create(model=model, input="?", tools=[auto(file_ids=ids)], include=OUTPUTS)
    assert answer.output[0].outputs[0].logs == "one two\n"
    assert "/mnt/data/data.csv (3 bytes), /mnt/data/data-2.csv (3 bytes)" in description(upstream.asked(model)[0])


def test_the_same_files_are_not_copied_again_in_the_next_turn(client: OpenAI, upstream: ScriptedUpstream):
    id = client.files.create(file=("data.csv", b"one"), purpose="user_data").id
    model = upstream.play("chat", [Code("open('data.csv','a').write('!')")], [Text("ok")], [Code(LIST)], [Text("ok")])
    first = client.responses.create(model=model, input="?", tools=[auto(file_ids=[id])])
    second = client.responses.create(
        model=model, input="?", tools=[auto(file_ids=[id])], previous_response_id=first.id, include=OUTPUTS
    )
    assert second.output[0].container_id == first.output[0].container_id
    assert second.output[0].outputs[0].logs == "['data.csv']\n"


@pytest.mark.parametrize("ids", [["file-unknown"], ["file-x"] * 2])
def test_unknown_file_ids_are_refused_before_the_model_is_asked(
    client: OpenAI, upstream: ScriptedUpstream, ids: list[str]
):
    model = upstream.play("chat", [Text("never")])
    with pytest.raises(openai.NotFoundError, match="No such File object"):
        client.responses.create(model=model, input="?", tools=[auto(file_ids=ids)])
    assert upstream.asked(model) == []


def test_foreign_file_ids_are_unknown(client: OpenAI, stranger: OpenAI):
    id = client.files.create(file=b"secret", purpose="user_data").id
    with pytest.raises(openai.NotFoundError, match="No such File object"):
        stranger.responses.create(model="cloche/echo", input="?", tools=[auto(file_ids=[id])])


def test_51_file_ids_are_too_many(client: OpenAI):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="cloche/echo", input="?", tools=[auto(file_ids=[f"file-{n}" for n in range(51)])])
    assert refused.value.param == "tools[0].container.file_ids"


def message(*parts: dict) -> list[dict]:
    return [{"role": "user", "content": [{"type": "input_text", "text": "Look:"}, *parts]}]


def test_files_and_pictures_of_a_message_are_copied_and_noted(
    client: OpenAI, upstream: ScriptedUpstream, play: Callable[..., str]
):
    stored = client.files.create(file=("stored.txt", b"stored"), purpose="user_data").id
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    parts = message(
        {"type": "input_file", "file_id": stored},
        {"type": "input_file", "filename": "../in line.txt", "file_data": base64.b64encode(b"inline").decode()},
        {
            "type": "input_file",
            "filename": "a.csv",
            "file_data": "data:text/csv;base64," + base64.b64encode(b"1").decode(),
        },
        {"type": "input_image", "image_url": url, "detail": "auto"},
    )
    model = play([Code(f"{LIST}; print(open('in line.txt').read())")], [Text("ok")])
    answer = client.responses.create(model=model, input=parts, tools=[CODE_INTERPRETER], include=OUTPUTS)
    assert answer.output[0].outputs[0].logs == "['a.csv', 'image.png', 'in line.txt', 'stored.txt']\ninline\n"
    said = str(upstream.asked(model)[0].body)
    assert "The user's file in line.txt is at /mnt/data/in line.txt." in said
    assert "input_file" not in said and url in said


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "input_file", "file_url": "https://example.org/x"}, "file_url"),
        ({"type": "input_file", "filename": "x", "file_data": "no base64!"}, "file_data"),
        ({"type": "input_file", "filename": "x", "file_data": 5}, "file_data"),
        ({"type": "input_file"}, "file_id"),
    ],
)
def test_files_that_cannot_be_had_are_named(client: OpenAI, part: dict, field: str):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="cloche/echo", input=message(part), tools=[CODE_INTERPRETER])
    assert refused.value.param == f"input[0].content[1].{field}"


# -- which container


def test_an_expired_container_of_the_conversation_is_replaced_with_its_files_and_the_model_told(
    client: OpenAI, upstream: ScriptedUpstream, play: Callable[..., str], expire: Callable[[str], None]
):
    id = client.files.create(file=("data.csv", b"one"), purpose="user_data").id
    legs = (
        [Code("x = 1; open('made.txt','w').write('made'); open('lost.txt','w').write('lost')")],
        [Text("[m](sandbox:/mnt/data/made.txt)")],
    )
    model = play(
        *legs,
        [Code(f"{LIST}; print(open('made.txt').read(), 'x' in globals())")],
        [Text("[m](sandbox:/mnt/data/made.txt)")],
    )
    first = client.responses.create(model=model, input="?", tools=[auto(file_ids=[id])])
    old = first.output[0].container_id
    expire(old)
    second = client.responses.create(
        model=model, input="?", tools=[auto(file_ids=[id])], previous_response_id=first.id, include=OUTPUTS
    )
    assert second.output[0].container_id != old
    assert second.output[0].outputs[0].logs == "['data.csv', 'made.txt']\nmade False\n"
    asked = upstream.asked(model)
    assert "has expired and was replaced" in description(asked[2])
    assert "/mnt/data/made.txt (4 bytes)" in description(asked[2])
    assert "has expired and was replaced" in asked[3].outputs[-1]
    # Both citations can be fetched: the old container's, and the new one's.
    for cited in (*annotations(first), *annotations(second)):
        content = client.containers.files.content.retrieve(cited.file_id, container_id=cited.container_id)
        assert content.read() == b"made"


def test_a_named_container_that_expired_is_refused(client: OpenAI, expire: Callable[[str], None]):
    container = client.containers.create(name="short").id
    expire(container)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(
            model="cloche/echo", input="?", tools=[{"type": "code_interpreter", "container": container}]
        )
    assert refused.value.body["message"] == "Container is expired."
    client.containers.delete(container)


def test_a_container_that_dies_in_the_middle_of_a_turn_is_replaced_at_the_next_code(
    client: OpenAI, upstream: ScriptedUpstream, gateway_server: RunningServer
):
    headers = {"authorization": f"Bearer {gateway_server.key}"}

    def kill(body: dict) -> list:
        for container in client.containers.list(limit=1):
            httpx2.delete(
                f"{gateway_server.url}/api/v1/sandboxes/{container.id.removeprefix('cntr_')}", headers=headers
            ).raise_for_status()
            return [Code("print('x' in globals())")]
        raise AssertionError

    model = upstream.play("chat", [Code("x = 1")], kill, [Text("ok")])
    answer = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER], include=OUTPUTS)
    first, second = answer.output[:2]
    assert first.container_id != second.container_id
    assert second.outputs[0].logs == "False\n"
    assert "was replaced" in upstream.asked(model)[2].outputs[-1]


def test_a_container_that_dies_while_the_model_writes_code_is_replaced_too(client: OpenAI, upstream: ScriptedUpstream):
    killed = threading.Event()
    model = upstream.play("chat", [Code("x = 1"), WaitFor(killed)], [Code("print(2)")], [Text("ok")])
    stream = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER], include=OUTPUTS, stream=True)
    for event in stream:
        if event.type == "response.output_item.added" and not killed.is_set():
            client.containers.delete(event.item.container_id)
            killed.set()
    first, second = event.response.output[:2]
    assert first.outputs[0].logs == "Kernel restarted: the container has ended; variables are lost\n"
    assert second.outputs[0].logs == "2\n" and second.container_id != first.container_id


def test_no_container_is_made_for_a_turn_without_code(client: OpenAI, stranger: OpenAI):
    id = stranger.files.create(file=("data.csv", b"one"), purpose="user_data").id
    before = {each.id for each in stranger.containers.list()}
    stranger.responses.create(model="cloche/echo", input="nothing to run", tools=[auto(file_ids=[id])])
    assert {each.id for each in stranger.containers.list()} == before


def test_without_the_code_tool_a_stored_file_goes_to_the_upstream_in_itself(client: OpenAI, upstream: ScriptedUpstream):
    pdf = client.files.create(file=("a.pdf", b"%PDF-1.4"), purpose="user_data").id
    picture = client.files.create(file=("a.png", PNG), purpose="vision").id
    model = upstream.play("resp", [Text("ok")])
    parts = message(
        {"type": "input_file", "file_id": pdf},
        {"type": "input_image", "file_id": picture, "detail": "low"},
        {"type": "input_file", "file_id": "file-of-the-upstream"},
    )
    client.responses.create(model=model, input=parts)
    sent = upstream.asked(model)[0].body["input"][0]["content"][1:]
    assert sent[0]["file_data"] == "data:application/pdf;base64," + base64.b64encode(b"%PDF-1.4").decode()
    assert sent[1]["image_url"] == "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert sent[2]["file_id"] == "file-of-the-upstream"


def test_the_container_of_a_chat_session_is_replaced_with_its_files(
    client: OpenAI, upstream: ScriptedUpstream, expire: Callable[[str], None]
):
    def chat(text: str, *legs) -> str:
        model = upstream.play("chat", *legs)
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": text}],
            tools=[CODE_INTERPRETER],
            metadata={"session_id": "one"},
        )
        return model

    chat("?", [Code("open('a.txt','w').write('kept')")], [Text("[a](sandbox:/mnt/data/a.txt)")])
    expire(client.containers.list(limit=1).data[0].id)
    model = chat("?", [Code("print(open('a.txt').read())")], [Text("ok")])
    assert "was replaced" in description(upstream.asked(model)[0])
    assert "kept" in upstream.asked(model)[1].outputs[-1]
