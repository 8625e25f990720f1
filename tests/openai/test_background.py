"""Responses in the background: polled, followed, resumed, cancelled."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from tests.conftest import serving, wait_until
from tests.openai.conftest import CODE_INTERPRETER, client_of
from tests.openai.test_store import OUTPUTS, fenced, logs
from tests.openai.upstream import BreakOff, Code, Hang, HttpError, ScriptedUpstream, Text, WaitFor

from cloche.api.openai.background import BackgroundRun
from cloche.api.openai.responses_request import ResponseRequest
from cloche.api.openai.responses_stream import ResponseTurn
from cloche.config import Config, PoolConfig
from cloche.gateway.gateway import Gateway
from cloche.gateway.request import TurnRequest
from cloche.sdk.assembly import assemble_engine
from cloche.store.gateway import GatewayStore

ENDLESS = "print('begun', flush=True)\nx = 7\nwhile True: pass"
KEY = "e2b_" + "0" * 40
Play = Callable[..., str]


def background(client: openai.OpenAI, code: str, **options):
    options = {"tools": [CODE_INTERPRETER], **options}
    return client.responses.create(model="cloche/echo", input=fenced(code), background=True, **options)


def ended(client: openai.OpenAI, id: str, **options):
    wait_until(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(id, **options)


def wait_for_code(client: openai.OpenAI, id: str) -> None:
    with client.responses.retrieve(id, stream=True) as stream:
        assert any(event.type == "response.code_interpreter_call.interpreting" for event in stream)


def test_it_answers_at_once_and_the_outputs_are_there_later(client: openai.OpenAI):
    made = background(client, "print('done')")
    assert (made.status, made.background, made.output) == ("queued", True, [])
    whole = ended(client, made.id, include=[OUTPUTS])
    assert (whole.status, logs(whole)) == ("completed", ["done\n"])
    assert client.responses.retrieve(made.id).output[0].outputs is None


def test_outputs_that_were_asked_for_at_first_need_not_be_asked_for_again(client: openai.OpenAI):
    made = background(client, "print('done')", include=[OUTPUTS])
    assert logs(ended(client, made.id)) == ["done\n"]
    last = list(client.responses.retrieve(made.id, stream=True))[-1]
    assert logs(last.response) == ["done\n"]


def test_it_continues_after_a_disconnect_and_is_followed_from_there(client: openai.OpenAI, play: Play):
    left = threading.Event()
    model = play([Text("first", chunks=1), WaitFor(left), Text(" and last", chunks=1)])
    with client.responses.create(model=model, input="?", background=True, stream=True) as stream:
        seen = [next(event for event in stream if event.type == kind) for kind in ("response.created",)]
        last = next(event for event in stream if event.type == "response.output_text.delta")
    id = seen[0].response.id
    assert client.responses.retrieve(id).status == "in_progress"
    followed = client.responses.retrieve(id, stream=True, starting_after=last.sequence_number)
    left.set()
    rest = list(followed)
    assert [event.sequence_number for event in rest] == list(
        range(last.sequence_number + 1, last.sequence_number + 1 + len(rest))
    )
    assert rest[-1].type == "response.completed" and rest[-1].response.output_text == "first and last"


def test_resuming_after_any_event_gives_exactly_the_rest(client: openai.OpenAI):
    made = background(client, "print(1)")
    ended(client, made.id)
    whole = list(client.responses.retrieve(made.id, stream=True))
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert [event.type for event in whole[:3]] == ["response.created", "response.queued", "response.in_progress"]
    for after in (0, 5, len(whole) - 2, len(whole) - 1, len(whole) + 9):
        rest = list(client.responses.retrieve(made.id, stream=True, starting_after=after))
        assert rest == whole[after + 1 :]


async def test_its_first_events_are_kept_however_long_it_took_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cloche.api.openai.background.FLUSH_SECONDS", -1.0)  # it took longer
    config = Config(data_dir=str(tmp_path), pool=PoolConfig(ready=0))
    async with assemble_engine(config) as engine, GatewayStore(tmp_path, 30) as gateway_store:
        gateway = Gateway(engine, config, gateway_store, gateway_store.steps.put)
        wanted = ResponseRequest(model="cloche/echo", input=[{"role": "user", "content": "?"}], background=True)
        asked = TurnRequest(model=wanted.model, items=wanted.input)
        run = BackgroundRun(ResponseTurn(gateway, gateway.trace("req", "me"), wanted, asked), gateway)
        await run.begin()
        told = [event async for batch in run.follow(-1) for event in batch]
        kept = await gateway_store.responses.events(run.answer.events.id, -1)
        await gateway.stop()
    assert [event["type"] for event in kept] == [event["type"] for event in told]
    assert kept[0]["type"] == "response.created"


def test_the_sdk_follows_it_by_its_id(client: openai.OpenAI):
    made = background(client, "print('followed')")
    with client.responses.stream(response_id=made.id) as stream:
        assert "followed" in stream.get_final_response().output_text
    with client.responses.stream(response_id=made.id, starting_after=4) as stream:
        assert all(event.sequence_number > 4 for event in stream)


def test_cancelling_interrupts_the_code_and_the_container_lives(client: openai.OpenAI):
    made = background(client, ENDLESS)
    wait_for_code(client, made.id)
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled" and cancelled.output[0].status == "incomplete"
    assert client.responses.cancel(made.id) == cancelled == client.responses.retrieve(made.id)
    assert list(client.responses.retrieve(made.id, stream=True))[-1].response.status == "cancelled"
    options = {"tools": [CODE_INTERPRETER], "include": [OUTPUTS]}
    again = client.responses.create(model="cloche/echo", input=fenced("x"), previous_response_id=made.id, **options)
    assert logs(again) == ["7\n"]
    assert again.output[0].container_id == cancelled.output[0].container_id


def test_a_following_client_sees_the_cancellation(client: openai.OpenAI):
    made = background(client, ENDLESS)
    wait_for_code(client, made.id)
    with client.responses.retrieve(made.id, stream=True) as stream:
        client.responses.cancel(made.id)
        assert list(stream)[-1].response.status == "cancelled"


def test_deleting_one_that_runs_ends_it(client: openai.OpenAI):
    made = background(client, ENDLESS)
    wait_for_code(client, made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_one_that_has_not_ended_has_its_input_and_cannot_be_gone_on_from(client: openai.OpenAI):
    made = background(client, ENDLESS)
    assert [item.type for item in client.responses.input_items.list(made.id)] == ["message"]
    assert client.responses.retrieve(made.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.responses.create(model="cloche/echo", input="x", previous_response_id=made.id)
    client.responses.cancel(made.id)


@pytest.mark.parametrize("failure", [HttpError(429, {"error": {"message": "too fast"}}), BreakOff()])
def test_a_failure_is_told_by_its_status(client: openai.OpenAI, play: Play, failure: object):
    model = play([Code("print(1)")], [failure])
    made = client.responses.create(model=model, input="?", background=True, tools=[CODE_INTERPRETER], include=[OUTPUTS])
    failed = ended(client, made.id)
    assert failed.status == "failed" and failed.error is not None
    assert logs(failed) == ["1\n"]


def test_foreseeable_errors_are_reported_at_once(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="unknown", input="?", background=True)
    gone = {"type": "code_interpreter", "container": "cntr_unknown"}
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="cloche/echo", input="?", background=True, tools=[gone])
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="cloche/echo", input="?", background=True, store=False)
    assert refused.value.param == "store"
    made = background(client, "1")
    ended(client, made.id)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        client.responses.retrieve(made.id, stream=True, extra_query={"starting_after": "soon"})


def test_only_so_many_run_at_once(stranger: openai.OpenAI, upstream: ScriptedUpstream):
    model, begun = "chat-endless", []
    upstream.script(model, lambda body: [Hang()])
    with pytest.raises(openai.RateLimitError, match="background"):
        for _ in range(60):
            begun.append(stranger.responses.create(model=model, input="?", background=True).id)
    for id in begun:
        stranger.responses.cancel(id)
    assert ended(stranger, background(stranger, "1").id).status == "completed"


@pytest.mark.long
def test_a_server_that_ends_leaves_none_in_progress(own_data_dir: Path):
    left = ""
    for end in (signal.SIGTERM, signal.SIGKILL, None):
        with serving(own_data_dir, env={"CLOCHE_API_KEY": KEY}) as server:
            client = client_of(server._replace(key=KEY))
            if left:
                _check_lost(client, left)
            if end is not None:
                left = background(client, ENDLESS).id
                wait_for_code(client, left)
                server.process.send_signal(end)
                server.process.wait(60)


def _check_lost(client: openai.OpenAI, id: str) -> None:
    failed = client.responses.retrieve(id)
    assert failed.status == "failed" and failed.error is not None
    assert "server" in failed.error.message.lower()
    with client.responses.with_streaming_response.retrieve(id, stream=True) as stream:
        told = stream.read().decode()
    assert told.startswith("event: response.created") and told.count("event: response.failed") == 1
