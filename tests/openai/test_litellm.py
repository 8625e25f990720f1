"""LiteLLM and Cloche, in the four ways in which they go together. docs/dialects/litellm.md has their configurations.

LiteLLM lives in an environment of its own, which `make litellm-test` makes; without it nothing of this runs. It is a
process here, as its users have it: its proxy, or a program that calls its functions.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2
import openai
import pytest
from tests.conftest import RunningServer, free_port, serving, wait_until, with_template
from tests.openai.conftest import CODE_INTERPRETER
from tests.openai.upstream import Code, Function, ScriptedUpstream, Text

PLACE = os.environ.get("LITELLM_ENV", "")
PROGRAMS = Path(__file__).parent.parent / "litellm"
MASTER_KEY = "sk-" + "5" * 32  # of the proxy, which refuses those that are well known
START_SECONDS = 280.0  # on a busy machine; else ten

pytestmark = [
    pytest.mark.skipif(not PLACE, reason="LiteLLM has an environment of its own: make litellm-test"),
    pytest.mark.timeout(600),
]

CLOCHE = """
[[upstream]]
models = ["via/chat-*"]
base_url = "{litellm}/v1"
api_key = "{key}"
api = "chat"

[[upstream]]
models = ["via/resp-*"]
base_url = "{litellm}/v1"
api_key = "{key}"
api = "responses"

[[upstream]]
models = ["resp-*", "gpt-*"]
base_url = "{model}"
api = "responses"

[[upstream]]
models = ["chat-*"]
base_url = "{model}"
api = "chat"
"""

PLAIN = """
model_list:
  - model_name: "via/*"
    litellm_params: {{model: "openai/*", api_base: "{model}", api_key: "none"}}
  - model_name: "cloche/*"
    litellm_params: {{model: "openai/*", api_base: "{cloche}/v1", api_key: "{cloche_key}"}}
  - model_name: "cloche/resp-streams"
    litellm_params: {{model: "openai/resp-streams", api_base: "{cloche}/v1", api_key: "{cloche_key}"}}
    model_info: {{supports_native_streaming: true}}
general_settings: {{master_key: "{key}"}}
"""

INTERCEPTING = """
model_list:
  - model_name: "resp-*"
    litellm_params: {{model: "openai/resp-*", api_base: "{model}", api_key: "none"}}
  - model_name: "chat-*"
    litellm_params: {{model: "openai/chat-*", api_base: "{model}", api_key: "none"}}
sandbox_tools:
  - sandbox_tool_name: cloche
    litellm_params: {{sandbox_provider: opensandbox, api_base: "{cloche}/opensandbox/v1", api_key: "{cloche_key}"}}
litellm_settings:
  callbacks: ["code_interpreter_interception"]
  code_interpreter_interception_params: {{sandbox_tool_name: cloche}}
general_settings: {{master_key: "{key}"}}
"""


class Both(NamedTuple):
    """Cloche, a LiteLLM without and one with the interceptor, and a scripted model behind all three."""

    cloche: RunningServer
    plain: str
    intercepting: str
    model: ScriptedUpstream

    def client_of(self, litellm: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{litellm}/v1", api_key=MASTER_KEY, max_retries=0, timeout=60)

    @property
    def client(self) -> openai.OpenAI:
        """Of Cloche."""
        return openai.OpenAI(base_url=f"{self.cloche.url}/v1", api_key=self.cloche.key, max_retries=0, timeout=60)

    def sandboxes(self) -> list[str]:
        headers = {"open-sandbox-api-key": self.cloche.key}
        answer = httpx2.get(f"{self.cloche.url}/opensandbox/v1/sandboxes", headers=headers)
        return [each["id"] for each in answer.json()["items"]]


@pytest.fixture(scope="module")
def both(own_place: Path, upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    place = tmp_path_factory.mktemp("litellm")
    plain, intercepting = free_port(), free_port()
    config = place / "cloche.toml"
    config.write_text(CLOCHE.format(litellm=f"http://127.0.0.1:{plain}", key=MASTER_KEY, model=upstream.url))
    with serving(own_place, env={"CLOCHE_CONFIG": str(config)}) as cloche:
        said = {"model": upstream.url, "cloche": cloche.url, "cloche_key": cloche.key, "key": MASTER_KEY}
        (place / "plain.yaml").write_text(PLAIN.format(**said))
        (place / "intercepting.yaml").write_text(INTERCEPTING.format(**said))
        with (
            litellm(
                place / "plain.yaml", plain, OPENAI_BASE_URL=f"{cloche.url}/v1", OPENAI_API_KEY=cloche.key
            ) as first,
            litellm(place / "intercepting.yaml", intercepting) as second,
        ):
            for url in (first, second):
                wait_until(lambda url=url: is_ready(url), START_SECONDS)
            yield Both(cloche, first, second, upstream)


@contextmanager
def litellm(config: Path, port: int, **own: str) -> Iterator[str]:
    """A proxy that is about to be ready."""
    command = [f"{PLACE}/bin/litellm", "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with open(config.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(command, env={**environment(), **own}, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health/liveliness").status_code == 200
    except httpx2.HTTPError:
        return False


def environment() -> dict[str, str]:
    """Without what it would fetch, send or find elsewhere."""
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_MODE": "PRODUCTION"}
    return {**os.environ, **own}


def program(name: str, *args: str) -> dict:
    command = [f"{PLACE}/bin/python", str(PROGRAMS / name), *args]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def own_place(template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's own: its containers are listed."""
    return with_template(tmp_path_factory.mktemp("cloche") / "data", template)


# -- its functions, with sandboxes of ours


def test_the_functions_of_litellm_run_code_in_our_sandboxes(both: Both):
    said = program("sandboxes.py", f"{both.cloche.url}/opensandbox/v1", both.cloche.key)
    first, second, by_id, shell = said["runs"]
    assert (first["stdout"], first["results"], first["error"]) == ("42\n", [{"text": "6"}], None)
    assert (second["stdout"], second["stderr"]) == ("6\n", "e\n")
    assert (second["error"]["name"], second["error"]["value"]) == ("ZeroDivisionError", "division by zero")
    assert second["error"]["traceback"][-1] == "ZeroDivisionError: division by zero"
    assert (by_id["stdout"], shell["stdout"]) == ("6\n", "42\n")
    assert said["deleted"] == [True, False]
    assert said["tool"]["stdout"] == "45\n"
    assert "no network but loopback" in said["open"]
    assert "no template 'no-such'" in said["unknown"]
    assert said["id"] not in both.sandboxes()


# -- its interceptor, with sandboxes of ours


@pytest.mark.parametrize("stream", [False, True])
def test_the_interceptor_runs_code_in_our_sandboxes(both: Both, stream: bool):
    legs = [Function("litellm_code_execution", {"code": "print(6 * 7)"})], [Text("It is 42.")]
    model = both.model.play("resp", *legs)
    asked = {"model": model, "input": "6 times 7?", "tools": [CODE_INTERPRETER]}
    client = both.client_of(both.intercepting)
    if stream:
        last = list(client.responses.create(**asked, stream=True))[-1]
        response = last.response
    else:
        response = client.responses.create(**asked)
    call, message = response.output
    assert (call.type, call.code, call.outputs[0].logs) == ("code_interpreter_call", "print(6 * 7)", "42\n")
    assert message.content[0].text == "It is 42."
    assert both.model.asked(model)[1].outputs == ["42\n"]
    assert call.container_id.startswith("i")
    assert call.container_id not in both.sandboxes()


def test_the_interceptor_runs_code_for_chat_too(both: Both):
    model = both.model.play("chat", [Function("litellm_code_execution", {"code": "print(6 * 7)"})], [Text("It is 42.")])
    messages = [{"role": "user", "content": "6 times 7?"}]
    answer = both.client_of(both.intercepting).chat.completions.create(
        model=model, messages=messages, tools=[CODE_INTERPRETER]
    )
    assert answer.choices[0].message.content == "It is 42."
    assert both.model.asked(model)[1].outputs == ["42\n"]


def test_the_interceptor_keeps_a_sandbox_for_a_session(both: Both):
    runs = [[Function("litellm_code_execution", {"code": code})] for code in ("x = 6", "print(x * 7)")]
    legs = runs[0], [Text("Done.")], runs[1], [Text("42")]
    model, client = both.model.play("resp", *legs), both.client_of(both.intercepting)
    asked = {"model": model, "input": "?", "tools": [CODE_INTERPRETER], "metadata": {"session_id": "one"}}
    first, second = client.responses.create(**asked), client.responses.create(**asked)
    assert second.output[0].outputs[0].logs == "42\n"
    assert first.output[0].container_id == second.output[0].container_id
    assert first.output[0].container_id in both.sandboxes()


# -- LiteLLM behind Cloche


@pytest.mark.parametrize("style", ["chat", "resp"])
def test_litellm_serves_as_an_upstream(both: Both, style: str):
    model = both.model.play(style, [Code("print(6 * 7)")], [Text("It is 42.")])
    with both.client.responses.stream(model=f"via/{model}", input="?", tools=[CODE_INTERPRETER]) as stream:
        events = [event.type for event in stream]
        response = stream.get_final_response()
    assert [item.type for item in response.output] == ["code_interpreter_call", "message"]
    assert response.output_text == "It is 42."
    assert "response.code_interpreter_call_code.delta" in events
    assert both.model.asked(model)[1].outputs == ["42\n"]


# -- LiteLLM before Cloche


def test_a_container_goes_on_by_the_id_that_litellm_made_of_it(both: Both):
    client, asked = both.client_of(both.plain), {"input": "?", "include": ["code_interpreter_call.outputs"]}
    model = both.model.play("resp", [Code("x = 6")], [Text("Done.")], [Code("print(x * 7)")], [Text("42")])
    first = client.responses.create(model=f"cloche/{model}", tools=[CODE_INTERPRETER], **asked)
    tool = {"type": "code_interpreter", "container": first.output[0].container_id}
    assert len(tool["container"]) > 100
    second = client.responses.create(model=f"cloche/{model}", tools=[tool], **asked)
    assert second.output[0].outputs[0].logs == "42\n"


def test_a_conversation_goes_on_through_litellm(both: Both):
    client, asked = both.client_of(both.plain), {"input": "?", "include": ["code_interpreter_call.outputs"]}
    model = both.model.play("resp", [Code("x = 6")], [Text("Done.")], [Code("print(x * 7)")], [Text("42")])
    first = client.responses.create(model=f"cloche/{model}", tools=[CODE_INTERPRETER], **asked)
    second = client.responses.create(
        model=f"cloche/{model}", tools=[CODE_INTERPRETER], previous_response_id=first.id, **asked
    )
    assert second.output[0].outputs[0].logs == "42\n"
    assert client.responses.retrieve(first.id).output_text == "Done."


def test_litellm_passes_chat_through_to_cloche(both: Both):
    model = both.model.play("chat", [Code("print(6 * 7)")], [Text("It is 42.")])
    messages = [{"role": "user", "content": "6 times 7?"}]
    answer = both.client_of(both.plain).chat.completions.create(
        model=f"cloche/{model}", messages=messages, tools=[{"type": "code_interpreter"}]
    )
    assert answer.choices[0].message.content == "It is 42."
    assert both.model.asked(model)[1].outputs == ["42\n"]


CI_EVENTS = [
    "response.code_interpreter_call.in_progress",
    "response.code_interpreter_call_code.delta",
    "response.code_interpreter_call_code.done",
    "response.code_interpreter_call.interpreting",
    "response.code_interpreter_call.completed",
]


def test_litellm_passes_the_interpreter_through_to_cloche(both: Both):
    model = both.model.play("resp", [Code("print(6 * 7)")], [Text("It is 42.")])
    response = both.client_of(both.plain).responses.create(
        model=f"cloche/{model}", input="?", tools=[CODE_INTERPRETER], include=["code_interpreter_call.outputs"]
    )
    call, message = response.output
    assert (call.type, call.outputs[0].logs) == ("code_interpreter_call", "42\n")
    assert call.container_id.startswith("cntr_")
    assert message.content[0].text == "It is 42."


@pytest.mark.parametrize("name", ["gpt-4o", "resp-streams"])
def test_litellm_streams_the_interpreters_events_of_a_model_that_it_knows(both: Both, name: str):
    both.model.script(name, [[Code("print(6 * 7)")], [Text("It is 42.")]])
    stream = both.client_of(both.plain).responses.create(
        model=f"cloche/{name}", input="?", tools=[CODE_INTERPRETER], stream=True
    )
    kinds = [event.type for event in stream]
    assert list(dict.fromkeys(each for each in kinds if each in CI_EVENTS)) == CI_EVENTS


def test_litellm_makes_up_the_stream_of_a_model_that_it_does_not_know(both: Both):
    model = both.model.play("resp", [Code("print(6 * 7)")], [Text("It is 42.")])
    stream = both.client_of(both.plain).responses.create(
        model=f"cloche/{model}", input="?", tools=[CODE_INTERPRETER], stream=True
    )
    kinds = [event.type for event in stream]
    assert kinds[-1] == "response.completed"
    assert not set(kinds) & set(CI_EVENTS)


def test_the_containers_of_litellms_functions_are_ours(both: Both):
    said = program("containers.py", f"{both.cloche.url}/v1", both.cloche.key)
    assert said["id"].startswith("cntr_i")
    assert (said["name"], said["deleted"]) == ("of litellm", True)
    assert said["id"] in said["listed"]


def test_the_containers_of_litellms_proxy_are_ours(both: Both):
    """They have no model: the proxy takes what OPENAI_BASE_URL says."""
    client = both.client_of(both.plain)
    made = client.containers.create(name="by proxy")
    client.containers.files.create(made.id, file=("a.txt", b"6"))
    assert [file.path for file in client.containers.files.list(made.id)] == ["/mnt/data/a.txt"]
    model = both.model.play("resp", [Code("print(open('a.txt').read())")], [Text("6")])
    tool = {"type": "code_interpreter", "container": made.id}
    client.responses.create(model=f"cloche/{model}", input="?", tools=[tool])
    assert both.model.asked(model)[1].outputs == ["6\n"]
    assert client.containers.retrieve(made.id).name == "by proxy"
    client.containers.delete(made.id)
