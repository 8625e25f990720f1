"""LiteLLM and Cloche, in the four ways in which they go together. docs/dialects/litellm.md has their configurations.

LiteLLM lives in an environment of its own, which `make test-all` makes; without it nothing of this runs. It is a
process here, as its users have it: its proxy, or a program that calls its functions.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2
import openai
import pytest
from tests.conftest import REPOSITORY, RunningServer, free_port, serving, wait_until, with_template
from tests.openai.conftest import CODE_INTERPRETER
from tests.openai.upstream import Code, Function, ScriptedUpstream, Text
from tests.secure_server import serving_by_domain

PLACE = REPOSITORY / ".venv-litellm" / "bin"
PROGRAMS = REPOSITORY / "tests" / "litellm"
MASTER_KEY = "sk-" + "5" * 32  # of the proxy, which refuses those that are well known
START_SECONDS = 280.0  # on a busy machine; else ten

pytestmark = [
    pytest.mark.skipif(not PLACE.exists(), reason="LiteLLM has an environment of its own: make litellm-env"),
    pytest.mark.timeout(600),
    pytest.mark.long,
    pytest.mark.alone,
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
    litellm_params: {{sandbox_provider: {provider}, api_base: "{api_base}", api_key: "{cloche_key}"}}
litellm_settings:
  callbacks: ["code_interpreter_interception"]
  code_interpreter_interception_params: {{sandbox_tool_name: cloche}}
general_settings: {{master_key: "{key}"}}
"""


class Sandboxes(NamedTuple):
    """A server with sandboxes, the provider of LiteLLM that uses them, and a proxy with the interceptor."""

    provider: str
    cloche: RunningServer
    api_base: str
    trust: Mapping[str, str]  # variables of LiteLLM's processes
    proxy: str

    def list_ids(self) -> list[str]:
        trusted = ssl.create_default_context(cafile=self.trust.get("SSL_CERT_FILE"))
        headers = {"open-sandbox-api-key": self.cloche.key}
        answer = httpx2.get(f"{self.cloche.url}/opensandbox/v1/sandboxes", headers=headers, verify=trusted)
        return [each["id"] for each in answer.json()["items"]]


class Both(NamedTuple):
    """Cloche, a LiteLLM before and behind it, interceptors by provider, and a scripted model behind all of them."""

    cloche: RunningServer
    plain: str
    providers: Mapping[str, Sandboxes]
    model: ScriptedUpstream

    @property
    def client(self) -> openai.OpenAI:
        """Of Cloche."""
        return openai.OpenAI(base_url=f"{self.cloche.url}/v1", api_key=self.cloche.key, max_retries=0, timeout=60)


def client_of(proxy: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{proxy}/v1", api_key=MASTER_KEY, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def both(own_place: Path, upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    place = tmp_path_factory.mktemp("litellm")
    plain = free_port()
    config = place / "cloche.toml"
    config.write_text(CLOCHE.format(litellm=f"http://127.0.0.1:{plain}", key=MASTER_KEY, model=upstream.url))
    with (
        serving(own_place, env={"CLOCHE_CONFIG": str(config)}) as cloche,
        serving_by_domain(own_place, place) as secure,
    ):
        said = {"model": upstream.url, "cloche": cloche.url, "cloche_key": cloche.key, "key": MASTER_KEY}
        (place / "plain.yaml").write_text(PLAIN.format(**said))
        containers = {"OPENAI_BASE_URL": f"{cloche.url}/v1", "OPENAI_API_KEY": cloche.key}
        kinds = (
            Sandboxes("opensandbox", cloche, f"{cloche.url}/opensandbox/v1", {}, url_of(free_port())),
            Sandboxes("e2b", secure.running, f"{secure.running.url}/e2b", secure.trust, url_of(free_port())),
        )
        with (
            litellm(place / "plain.yaml", plain, containers),
            intercepting(place, upstream, kinds[0]),
            intercepting(place, upstream, kinds[1]),
        ):
            for url in (url_of(plain), *(each.proxy for each in kinds)):
                wait_until(lambda url=url: is_ready(url), START_SECONDS)
            yield Both(cloche, url_of(plain), {each.provider: each for each in kinds}, upstream)


@contextmanager
def intercepting(place: Path, upstream: ScriptedUpstream, kind: Sandboxes) -> Iterator[None]:
    """A proxy with the interceptor that is about to be ready."""
    config = place / f"{kind.provider}.yaml"
    own = {"provider": kind.provider, "api_base": kind.api_base, "cloche_key": kind.cloche.key}
    config.write_text(INTERCEPTING.format(model=upstream.url, key=MASTER_KEY, **own))
    with litellm(config, int(kind.proxy.rpartition(":")[2]), kind.trust):
        yield


@contextmanager
def litellm(config: Path, port: int, own: Mapping[str, str]) -> Iterator[None]:
    """A proxy that is about to be ready."""
    command = [f"{PLACE}/litellm", "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with open(config.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(command, env={**environment(), **own}, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health/liveliness").status_code == 200
    except httpx2.HTTPError:
        return False


def environment() -> dict[str, str]:
    """Without what it would fetch, send or find elsewhere."""
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_MODE": "PRODUCTION"}
    return {**os.environ, **own}


def program(name: str, *args: str, own: Mapping[str, str] | None = None) -> dict:
    command = [f"{PLACE}/python", str(PROGRAMS / name), *args]
    environ = {**environment(), **(own or {})}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
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
    assert said["id"] not in both.providers["opensandbox"].list_ids()


def test_its_functions_with_e2b_stay_with_our_server(both: Both):
    """Its data plane is at `https://49999-{id}.{domain}`, with the domain that the server answers."""
    kind = both.providers["e2b"]
    said = program("e2b_sandboxes.py", kind.api_base, kind.cloche.key, own=kind.trust)
    assert said["domain"].startswith("cloche.localhost:")
    first, second = said["runs"]
    assert (first["stdout"], first["results"][0]["text"], first["error"]) == ("42\n", "6", None)
    assert (second["error"]["name"], second["error"]["value"]) == ("ZeroDivisionError", "division by zero")
    assert said["deleted"] == [True, False]
    assert said["tool"]["stdout"] == "45\n"
    assert kind.list_ids() == []


# -- its interceptor, with sandboxes of ours


@pytest.fixture(params=["opensandbox", "e2b"])
def kind(request: pytest.FixtureRequest, both: Both) -> Sandboxes:
    return both.providers[request.param]


def test_the_example_of_the_interceptor_runs_by_the_sdk(both: Both, kind: Sandboxes):
    """Both parts of the vendor's announcement, as it has them but for api_base."""
    legs = [Function("litellm_code_execution", {"code": "print(6 * 7)"})], [Text("It is 42.")]
    models = both.model.play("resp", *legs), both.model.play("chat", *legs)
    place = (kind.provider, kind.api_base, kind.cloche.key, both.model.url)
    said = program("interceptor.py", *place, *models, own=kind.trust)
    assert (said["text"], said["chat"]) == ("It is 42.", "It is 42.")
    assert (said["call"]["type"], said["call"]["outputs"][0]["logs"]) == ("code_interpreter_call", "42\n")
    assert [both.model.asked(model)[1].outputs for model in models] == [["42\n"], ["42\n"]]
    assert said["call"]["container_id"] not in kind.list_ids()


@pytest.mark.parametrize("stream", [False, True])
def test_the_interceptor_runs_code_in_our_sandboxes(both: Both, kind: Sandboxes, stream: bool):
    legs = [Function("litellm_code_execution", {"code": "print(6 * 7)"})], [Text("It is 42.")]
    model = both.model.play("resp", *legs)
    asked = {"model": model, "input": "6 times 7?", "tools": [CODE_INTERPRETER]}
    client = client_of(kind.proxy)
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
    assert call.container_id not in kind.list_ids()


def test_the_interceptor_runs_code_for_chat_too(both: Both, kind: Sandboxes):
    model = both.model.play("chat", [Function("litellm_code_execution", {"code": "print(6 * 7)"})], [Text("It is 42.")])
    messages = [{"role": "user", "content": "6 times 7?"}]
    answer = client_of(kind.proxy).chat.completions.create(model=model, messages=messages, tools=[CODE_INTERPRETER])
    assert answer.choices[0].message.content == "It is 42."
    assert both.model.asked(model)[1].outputs == ["42\n"]


def test_the_interceptor_keeps_a_sandbox_for_a_session(both: Both, kind: Sandboxes):
    runs = [[Function("litellm_code_execution", {"code": code})] for code in ("x = 6", "print(x * 7)")]
    legs = runs[0], [Text("Done.")], runs[1], [Text("42")]
    model, client = both.model.play("resp", *legs), client_of(kind.proxy)
    asked = {"model": model, "input": "?", "tools": [CODE_INTERPRETER], "metadata": {"session_id": "one"}}
    first, second = client.responses.create(**asked), client.responses.create(**asked)
    assert second.output[0].outputs[0].logs == "42\n"
    assert first.output[0].container_id == second.output[0].container_id
    assert first.output[0].container_id in kind.list_ids()


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
    client, asked = client_of(both.plain), {"input": "?", "include": ["code_interpreter_call.outputs"]}
    model = both.model.play("resp", [Code("x = 6")], [Text("Done.")], [Code("print(x * 7)")], [Text("42")])
    first = client.responses.create(model=f"cloche/{model}", tools=[CODE_INTERPRETER], **asked)
    tool = {"type": "code_interpreter", "container": first.output[0].container_id}
    assert len(tool["container"]) > 100
    second = client.responses.create(model=f"cloche/{model}", tools=[tool], **asked)
    assert second.output[0].outputs[0].logs == "42\n"


def test_a_conversation_goes_on_through_litellm(both: Both):
    client, asked = client_of(both.plain), {"input": "?", "include": ["code_interpreter_call.outputs"]}
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
    answer = client_of(both.plain).chat.completions.create(
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
    response = client_of(both.plain).responses.create(
        model=f"cloche/{model}", input="?", tools=[CODE_INTERPRETER], include=["code_interpreter_call.outputs"]
    )
    call, message = response.output
    assert (call.type, call.outputs[0].logs) == ("code_interpreter_call", "42\n")
    assert call.container_id.startswith("cntr_")
    assert message.content[0].text == "It is 42."


@pytest.mark.parametrize("name", ["gpt-4o", "resp-streams"])
def test_litellm_streams_the_interpreters_events_of_a_model_that_it_knows(both: Both, name: str):
    both.model.script(name, [[Code("print(6 * 7)")], [Text("It is 42.")]])
    stream = client_of(both.plain).responses.create(
        model=f"cloche/{name}", input="?", tools=[CODE_INTERPRETER], stream=True
    )
    kinds = [event.type for event in stream]
    assert list(dict.fromkeys(each for each in kinds if each in CI_EVENTS)) == CI_EVENTS


def test_litellm_makes_up_the_stream_of_a_model_that_it_does_not_know(both: Both):
    model = both.model.play("resp", [Code("print(6 * 7)")], [Text("It is 42.")])
    stream = client_of(both.plain).responses.create(
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
    client = client_of(both.plain)
    made = client.containers.create(name="by proxy")
    client.containers.files.create(made.id, file=("a.txt", b"6"))
    assert [file.path for file in client.containers.files.list(made.id)] == ["/mnt/data/a.txt"]
    model = both.model.play("resp", [Code("print(open('a.txt').read())")], [Text("6")])
    tool = {"type": "code_interpreter", "container": made.id}
    client.responses.create(model=f"cloche/{model}", input="?", tools=[tool])
    assert both.model.asked(model)[1].outputs == ["6\n"]
    assert client.containers.retrieve(made.id).name == "by proxy"
    client.containers.delete(made.id)
