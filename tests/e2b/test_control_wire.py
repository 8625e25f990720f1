"""What the control plane is asked for: bodies and queries as the released clients send them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche import errors
from cloche.api.dialect import NotSupported, decode_json_body
from cloche.api.e2b.sandboxes_schema import (
    E2bCreateRequest,
    E2bSandboxQuery,
    SetTimeoutBody,
    decode_create_request,
    decode_metadata_filter,
    decode_sandbox_query,
    encode_page_token,
)

# As sent by e2b 2.63.0 (Python), 2.51.0 (JavaScript) and 2.45.1 (Python), whose defaults must never be refused.
PYTHON = b'{"templateID":"code-interpreter-v1","timeout":123,"metadata":{"a":"b"},"envVars":{"X":"1"}}'
JAVASCRIPT = b'{"templateID":"code-interpreter-v1","metadata":{"a":"b"},"envVars":{"X":"1"},"timeout":60}'
OLD_PYTHON = (
    b'{"templateID":"base","timeout":60,"secure":true,"allow_internet_access":true,"metadata":{},"envVars":{},'
    b'"autoPause":false,"autoPauseMemory":true}'
)


def test_the_released_clients_default_requests_are_taken():
    asked = decode_create_request(PYTHON, version=2)
    assert (asked.template, asked.timeout_seconds) == ("code-interpreter-v1", 123)
    assert (asked.metadata, asked.env) == ({"a": "b"}, {"X": "1"})
    assert decode_create_request(JAVASCRIPT, version=2).timeout_seconds == 60
    assert decode_create_request(OLD_PYTHON, version=1).secure


def test_version_2_is_always_secure_and_lives_5_minutes():
    asked = decode_create_request(b'{"templateID":"base"}', version=2)
    assert (asked.secure, asked.public_traffic, asked.timeout_seconds) == (True, True, 300)


def test_version_1_is_secure_only_if_asked_and_lives_15_seconds():
    asked = decode_create_request(b'{"templateID":"base"}', version=1)
    assert (asked.secure, asked.timeout_seconds) == (False, 15)


def test_unknown_fields_are_ignored():
    assert (
        decode_create_request(b'{"templateID":"base","colour":"red","network":{"speed":1}}', version=2).template
        == "base"
    )


def test_an_mcp_configuration_is_taken_as_clients_start_the_gateway_themselves():
    assert decode_create_request(b'{"templateID":"base","mcp":{"invalid_server":{}}}', version=2).template == "base"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"templateID":5}', "templateID"),
        (b"{}", "templateID"),
        (b"", "templateID"),
        (b'{"templateID":"base","timeout":"60"}', "timeout"),
        (b'{"templateID":"base","timeout":1.5}', "timeout"),
        (b'{"templateID":"base","metadata":{"a":1}}', "metadata"),
        (b'{"templateID":"base","metadata":["a"]}', "metadata"),
        (b'{"templateID":"base","envVars":{"a":null}}', "envVars"),
        (b'{"templateID":"base","secure":"yes"}', "secure"),
        (b'{"templateID":"base","network":{"allowPublicTraffic":"no"}}', "network.allowPublicTraffic"),
        (b'{"templateID":"base","autoPauseMemory":false}', "autoPauseMemory"),
        (b'{"templateID":"base","autoPause":true,"autoPauseMemory":false,"autoResume":{"enabled":true}}', "autoResume"),
    ],
)
def test_a_wrong_field_is_named(body, field):
    with pytest.raises(errors.InvalidRequest, match=field):
        decode_create_request(body, version=2)


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff",
        b'{"templateID":"a"}x',
        b"1e999",
        DEEP,
        b'{"templateID":"a","mcp":%s}' % DEEP,
        b'{"templateID":"a","unheard":%s}' % DEEP,
        b'{"templateID":"a","timeout":%s}' % (b"9" * 5000),
        b'{"templateID":"a","metadata":{"a":"\\ud800"}}',
    ],
)
def test_a_body_that_is_not_an_object_is_refused(body):
    with pytest.raises(errors.InvalidRequest, match="body"):
        decode_create_request(body, version=2)


def test_traffic_can_be_private_only_where_tokens_exist():
    body = b'{"templateID":"base","network":{"allowPublicTraffic":false}}'
    assert not decode_create_request(body, version=2).public_traffic
    with pytest.raises(errors.InvalidRequest, match="allowPublicTraffic"):
        decode_create_request(body, version=1)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"templateID":"base","iam":{"tokens":{"aws":{}}}}', "iam"),
        (b'{"templateID":"base","network":{"egressProxy":{"address":"a:1080"}}}', "egressProxy"),
    ],
)
def test_unsupported_options_are_refused_by_name(body, field):
    with pytest.raises(NotSupported, match=field):
        decode_create_request(body, version=2)


def test_volumes_are_asked_for_by_path():
    body = b'{"templateID":"base","volumeMounts":[{"name":"vol","path":"/mnt/a/"},{"name":"other","path":"/mnt/b"}]}'
    assert decode_create_request(body, version=2).volumes == {"/mnt/a": "vol", "/mnt/b": "other"}
    with pytest.raises(errors.InvalidRequest, match="one path"):
        decode_create_request(body.replace(b"/mnt/b", b"/mnt/a"), version=2)


def test_unsupported_options_may_be_declined():
    body = (
        b'{"templateID":"base","autoPause":false,"autoResume":{"enabled":false},"volumeMounts":[],"iam":{"tokens":{}}}'
    )
    assert decode_create_request(body, version=2).template == "base"


def test_an_empty_body_is_an_empty_object():
    assert decode_json_body(b" \n", SetTimeoutBody).timeout is None


# -- lists


def test_metadata_is_decoded_as_often_as_clients_encode_it():
    # ?metadata=a%252520b%3Dc%252526d, once decoded: {"a b": "c&d"}
    assert decode_metadata_filter("a%2520b=c%2526d") == {"a b": "c&d"}
    assert decode_metadata_filter("a=b&c=d") == {"a": "b", "c": "d"}
    assert decode_metadata_filter("") == {}


def test_metadata_without_a_value_is_refused():
    with pytest.raises(errors.InvalidRequest, match="metadata"):
        decode_metadata_filter("alone")


def test_a_list_without_a_query_is_everything_newest_first():
    asked = decode_sandbox_query({})
    assert (asked.states, asked.order, asked.limit, asked.after) == (("running", "paused"), "desc", 100, None)


def test_a_page_goes_on_where_the_last_one_ended():
    asked = decode_sandbox_query(
        {"nextToken": encode_page_token(1_794_794_245_707_888, "iabc"), "limit": "7", "order": "asc"}
    )
    assert (asked.after, asked.limit, asked.order) == ((1_794_794_245_707_888, "iabc"), 7, "asc")


def test_times_are_compared_to_the_microsecond():
    for text in ("2026-01-01T00:00:00.106089Z", "2026-01-01T01:00:00.106089+01:00", "2026-01-01T00:00:00.106089"):
        assert decode_sandbox_query({"startedAfter": text}).started_after == 1_767_225_600_106_089


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "0"),
        ("limit", "101"),
        ("limit", "x"),
        ("limit", "-1"),
        ("limit", "9" * 5000),
        ("state", "running,gone"),
        ("order", "up"),
        ("startedAfter", "yesterday"),
        ("nextToken", "!"),
        ("nextToken", "AAAA"),
    ],
)
def test_a_wrong_parameter_is_named(name, value):
    with pytest.raises(errors.InvalidRequest, match=name):
        decode_sandbox_query({name: value})


@given(st.binary(max_size=200))
def test_no_body_breaks_the_reader(body):
    try:
        asked = decode_create_request(body, version=2)
    except (errors.InvalidRequest, NotSupported):
        return
    assert isinstance(asked, E2bCreateRequest)


@given(
    st.dictionaries(st.sampled_from(["metadata", "state", "limit", "nextToken", "startedAfter"]), st.text(max_size=40))
)
def test_no_query_breaks_the_reader(query):
    try:
        asked = decode_sandbox_query(query)
    except errors.InvalidRequest:
        return
    assert isinstance(asked, E2bSandboxQuery)
