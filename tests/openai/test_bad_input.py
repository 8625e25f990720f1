"""What clients send that makes no sense: a clear answer in OpenAI's shape, and the next request works."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import RunningServer
from tests.openai.nonsense import CHAT, ITEMS, RESPONSE, TOOLS, nonsense, values
from tests.openai.schemas import Frames, check
from tests.openai.upstream import ScriptedUpstream, Text
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

CODE_TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}
GOOD: dict[str, Any] = {"model": "cloche/echo", "input": "Hello"}


@pytest.fixture(scope="module")
def wire(gateway_server: RunningServer):
    """Requests as bytes: SDKs send no nonsense."""
    headers = {"authorization": f"Bearer {gateway_server.key}", "content-type": "application/json"}
    with httpx2.Client(base_url=gateway_server.url, headers=headers, timeout=60) as client:
        yield client


def refused(answer: httpx2.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    check("ErrorResponse", body)
    assert answer.headers["x-request-id"]
    return body["error"]


# -- what is said of well-known mistakes


def test_an_unknown_model_is_named(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="no-such-model", input="?")
    assert caught.value.code == "model_not_found" and "no-such-model" in caught.value.message
    assert "cloche/echo" in caught.value.message, "it does not say which there are"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": "?"}, "model", "missing_required_parameter"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].container", "missing_required_parameter"),
        ({"tools": [CODE_TOOL, CODE_TOOL]}, "tools[1]", "invalid_value"),
        (
            {"tools": [{**CODE_TOOL, "container": {"type": "auto", "file_ids": ["file-1"] * 51}}]},
            None,
            "array_above_max_length",
        ),
        ({"tools": [{**CODE_TOOL, "container": {"type": "auto", "memory_limit": "3g"}}]}, None, "invalid_value"),
        ({"tools": [{**CODE_TOOL, "container": {"type": "manual"}}]}, "tools[0].container", "invalid_value"),
        ({"tools": [{**CODE_TOOL, "container": 7}]}, "tools[0].container", "invalid_value"),
        ({"max_tool_calls": 0}, "max_tool_calls", "integer_below_min_value"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "object_above_max_properties"),
        ({"input": [7]}, "input[0]", "invalid_type"),
        ({"input": [{}]}, "input[0].type", "missing_required_parameter"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id", "invalid_value"),
    ],
)
def test_a_parameter_that_makes_no_sense_is_named(wire: httpx2.Client, body: dict, param: str | None, code: str):
    asked = {**GOOD, **body} if "model" not in str(param) else body
    error = refused(wire.post("/v1/responses", json=asked))
    assert error["type"] == "invalid_request_error" and error["code"] == code
    assert param is None or error["param"] == param


@pytest.mark.parametrize("container", ["cntr_" + "0" * 21, "cntr_", "nonsense", "cntr_../../etc", "cntr_é"])
def test_a_container_that_is_not_there_is_not_found(client: openai.OpenAI, container: str):
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(tools=[{**CODE_TOOL, "container": container}], **GOOD)
    assert "not found" in caught.value.message


def test_an_allow_list_of_hosts_is_refused_where_the_operator_allows_no_network(client: openai.OpenAI):
    policy = {"type": "allowlist", "allowed_domains": ["pypi.org"]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(tools=[{**CODE_TOOL, "container": {"type": "auto", "network_policy": policy}}], **GOOD)
    assert caught.value.param == "network_policy"
    assert "network.allow" in caught.value.message


# -- bodies that are no requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "cloche/echo", "input": "\xff"}',
        b'{"model": "cloche/echo", "input": "a\x00b"}',
        b"[" * 100_000,
        b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": 1e999}',
        b"NaN",
    ],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/containers", "/v1/conversations"])
def test_a_body_that_is_no_json_object_is_refused(wire: httpx2.Client, path: str, body: bytes):
    answer = wire.post(path, content=body)
    if path == "/v1/conversations" and not body:
        assert answer.status_code in (200, 400)  # all of its fields are optional
        return
    assert refused(answer)["message"]


def test_a_body_that_is_too_large_is_refused(wire: httpx2.Client):
    assert refused(wire.post("/v1/responses", content=b" " * (65 << 20)), 413)["message"]
    assert wire.post("/v1/responses", json=GOOD).status_code == 200


@pytest.mark.parametrize("text", ["a\0b", "\ud83d", "\U0010ffff", "\u202e", "\r\n" * 3, "x" * 1_000_000])
def test_odd_text_is_text(wire: httpx2.Client, text: str):
    answer = wire.post("/v1/responses", content=json.dumps({**GOOD, "input": text}).encode())
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 200:
        check("Response", answer.json())


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/nothing", "/v1/responses/", "/v1/responses/a/b/c", "/v1/%00"])
def test_a_path_that_is_nothing_is_said_in_the_same_shape(wire: httpx2.Client, path: str):
    refused(wire.get(path), 404)


def test_a_wrong_method_is_said_in_the_same_shape(wire: httpx2.Client):
    answer = wire.put("/v1/responses", json=GOOD)
    assert answer.status_code in (404, 405)
    check("ErrorResponse", answer.json())


def test_a_websocket_is_refused(gateway_server: RunningServer):
    """OpenAI has such a mode of Responses, and we have not."""
    url = gateway_server.url.replace("http", "ws") + "/v1/responses"
    headers = {"authorization": f"Bearer {gateway_server.key}"}
    with pytest.raises(InvalidStatus) as caught, connect(url, additional_headers=headers):
        pass
    assert caught.value.response.status_code == 403


# -- keys


@pytest.mark.parametrize("key", ["", "e2b_" + "1" * 40, "sk-nonsense", "My API Key"])
def test_a_wrong_key_is_refused(gateway_server: RunningServer, key: str):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = httpx2.post(f"{gateway_server.url}/v1/responses", headers=headers, json=GOOD)
    error = refused(answer, 401)
    assert error["code"] == "invalid_api_key" and (not key or key not in error["message"])


# -- anything


FIELDS = """
model input instructions tools tool_choice include max_tool_calls max_output_tokens metadata store stream background
previous_response_id conversation stream_options temperature top_p parallel_tool_calls reasoning text truncation
service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options top_logprobs user prompt
moderation image context_management
""".split()
changed_items = st.sampled_from([*ITEMS, {"type": "item_reference", "id": "msg_1"}]).flatmap(
    lambda item: (
        st.fixed_dictionaries(
            {**{name: st.just(item[name]) for name in item}, **dict.fromkeys(sorted(item)[:1], values)}
        )
        | st.sampled_from(sorted(item)).flatmap(lambda name: values.map(lambda value: {**item, name: value}))
    )
)
containers = st.dictionaries(st.sampled_from(["type", "file_ids", "memory_limit", "network_policy"]), values)
changed_tools = st.fixed_dictionaries({"type": st.just("code_interpreter"), "container": values | containers})
changes = st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=2) | st.one_of(
    st.lists(changed_items, max_size=3).map(lambda items: {"input": items}),
    st.lists(changed_tools | values, max_size=2).map(lambda tools: {"tools": tools}),
)

# Requests may be ahead of the document that we have: what is none of our business goes to the upstream, and is echoed.
ECHOED: dict[str, Any] = {
    "tools": [],
    "tool_choice": "auto",
    "reasoning": None,
    "text": {},
    "service_tier": None,
    "prompt_cache_retention": None,
}


@pytest.mark.parametrize("model", ["cloche/echo", "chat-any", "resp-any"])
def test_no_request_makes_the_server_fail(wire: httpx2.Client, upstream: ScriptedUpstream, model: str):
    upstream.script(model, lambda body: [Text("Yes.")])

    @given(changed=changes)
    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=150)
    def fuzzed(changed: dict[str, Any]) -> None:
        answer = wire.post("/v1/responses", content=json.dumps({**GOOD, "model": model, **changed}).encode())
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            check("ErrorResponse", answer.json())
        elif answer.headers["content-type"].startswith("text/event-stream"):
            for _, event in Frames().feed(answer.content):
                if "response" in event:
                    event["response"] |= ECHOED
                check("ResponseStreamEvent", event)
        else:
            check("Response", {**answer.json(), **ECHOED})

    fuzzed()


BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {**{name: RESPONSE[name] for name in RESPONSE if name != "conversation"}, "tools": TOOLS[1:]},
    "/v1/chat/completions": {**CHAT, "tools": [{"type": "code_interpreter"}, *CHAT["tools"][1:]]},
    "/v1/containers": {
        "name": "c",
        "expires_after": {"anchor": "last_active_at", "minutes": 1},
        "file_ids": [],
        "memory_limit": "1g",
        "network_policy": {
            "type": "disabled",
            "allowed_domains": [],
            "domain_secrets": [{"domain": "x.org", "name": "A", "value": "v"}],
        },
    },
    "/v1/conversations": {"items": [{"role": "user", "content": "Hello"}], "metadata": {}},
    "/v1/responses/input_tokens": GOOD,
}


@pytest.mark.parametrize("path", BODIES)
def test_no_body_makes_the_server_fail(wire: httpx2.Client, path: str):
    made: list[str] = []

    @given(body=nonsense(BODIES[path]))
    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=100)
    def fuzzed(body: dict[str, Any]) -> None:
        answer = wire.post(path, content=json.dumps(body).encode())
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            check("ErrorResponse", answer.json())
        elif path == "/v1/containers":
            check("ContainerResource", answer.json())
            made.append(answer.json()["id"])

    try:
        fuzzed()
    finally:
        for container in made:
            wire.delete(f"/v1/containers/{container}")


QUERIES = [
    "limit=0",
    "limit=101",
    "limit=x",
    "limit=",
    "limit=-1",
    "limit=9" + "9" * 5000,
    "order=up",
    "after=%00",
    "after=" + "x" * 5000,
]


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("path", ["/v1/containers", "/v1/files", "/v1/models"])
def test_no_query_makes_the_server_fail(wire: httpx2.Client, path: str, query: str):
    answer = wire.get(f"{path}?{query}")
    assert answer.status_code < 500
    if answer.status_code >= 400:
        check("ErrorResponse", answer.json())


@pytest.mark.parametrize("id", ["%00", "..%2f..", "x" * 5000, "%ff", "é", "resp_%0a"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/{}",
        "/v1/responses/{}/input_items",
        "/v1/containers/{}",
        "/v1/containers/{}/files",
        "/v1/files/{}",
        "/v1/files/{}/content",
        "/v1/conversations/{}",
        "/v1/models/{}",
    ],
)
def test_strange_ids_are_not_found(wire: httpx2.Client, path: str, id: str):
    refused(wire.get(path.format(id)), 404)
