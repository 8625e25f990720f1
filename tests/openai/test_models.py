"""`/v1/models`: what is configured, and what upstreams list where a pattern stands for many."""

from __future__ import annotations

import openai
import pytest
from tests.conftest import RunningServer, free_port
from tests.openai.upstream import ScriptedUpstream

from cloche import errors
from cloche.config import Config
from cloche.config.sections import UpstreamConfig
from cloche.gateway.gateway import build_routes
from cloche.gateway.upstream import ModelList, Upstreams, parse_models


def upstreams_of(*configured: UpstreamConfig) -> Upstreams:
    return Upstreams(build_routes(Config(data_dir="/nowhere", upstream=configured)))


async def names(upstreams: Upstreams) -> list[str]:
    try:
        return [model.name for model in await ModelList(upstreams).all()]
    finally:
        await upstreams.aclose()


async def test_a_name_is_listed_verbatim_and_a_pattern_as_the_upstreams_models():
    with ScriptedUpstream() as upstream:
        for name in ("gpt-5", "gpt-5-mini", "tts-1"):
            upstream.script(name, [])
        configured = UpstreamConfig(models=("mine", "gpt-5*"), base_url=upstream.url)
        assert await names(upstreams_of(configured)) == ["cloche/echo", "mine", "gpt-5", "gpt-5-mini"]


async def test_a_model_belongs_to_the_first_upstream_whose_pattern_matches():
    with ScriptedUpstream() as first, ScriptedUpstream() as second:
        first.script("gpt-5", [])
        for name in ("gpt-5", "gpt-4", "o4"):
            second.script(name, [])
        found = upstreams_of(
            UpstreamConfig(models=("gpt-5*",), base_url=first.url), UpstreamConfig(models=("*",), base_url=second.url)
        )
        assert await names(found) == ["cloche/echo", "gpt-5", "gpt-4", "o4"]


async def test_an_upstream_that_is_down_lists_nothing_and_its_models_can_be_asked_for():
    gone = f"http://127.0.0.1:{free_port()}/v1"
    found = upstreams_of(UpstreamConfig(models=("named", "gpt-*"), base_url=gone))
    models = ModelList(found)
    assert [model.name for model in await models.all()] == ["cloche/echo", "named"]
    assert (await models.get("gpt-5")).name == "gpt-5"
    await found.aclose()


async def test_a_name_that_its_upstream_does_not_list_is_not_there():
    with ScriptedUpstream() as upstream:
        upstream.script("gpt-5", [])
        found = upstreams_of(UpstreamConfig(models=("gpt-*",), base_url=upstream.url))
        models = ModelList(found)
        assert (await models.get("gpt-5")).owner == "script"
        with pytest.raises(errors.ModelNotFound):
            await models.get("gpt-77")
        upstream.script("gpt-77", [])
        with pytest.raises(errors.ModelNotFound):
            await models.get("gpt-77")  # lists are asked for once a minute
        await found.aclose()


async def test_an_alias_is_listed_independently_of_its_upstream():
    with ScriptedUpstream() as upstream:
        upstream.script("local", [])
        found = upstreams_of(UpstreamConfig(models=("gpt-*",), base_url=upstream.url, model="local"))
        assert (await ModelList(found).get("gpt-5")).name == "gpt-5"
        await found.aclose()


@pytest.mark.parametrize("body", [{}, {"data": None}, {"data": [None, 5, {"id": 7}, {"id": ""}, {"id": "x" * 1000}]}])
def test_a_list_that_makes_no_sense_is_empty(body: dict):
    assert parse_models(body) == []


def test_fields_that_make_no_sense_are_made_up():
    (model,) = parse_models({"data": [{"id": "m", "created": "yesterday", "owned_by": 5}]})
    assert (model.name, model.created, model.owner) == ("m", 0, "upstream")


def test_the_client_lists_models_and_gets_one_with_a_slash_in_its_name(client: openai.OpenAI):
    listed = {model.id: model for model in client.models.list()}
    echo = client.models.retrieve("cloche/echo")
    assert listed["cloche/echo"] == echo
    assert (echo.object, echo.owned_by) == ("model", "cloche")


def test_a_model_that_is_not_there_is_not_found(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody/nothing")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_models_need_a_key(gateway_server: RunningServer):
    stranger = openai.OpenAI(base_url=f"{gateway_server.url}/v1", api_key="e2b_" + "0" * 39 + "9", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
