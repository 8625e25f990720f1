"""How a server of models is reached: its key, its headers, and what a configuration that cannot work says."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.openai.upstream import HttpError

from cloche import errors
from cloche.config.sections import UpstreamConfig
from cloche.gateway.upstream import http
from cloche.gateway.upstream.http import (
    UpstreamServer,
    find_secrets,
    mask_secrets,
    parse_error,
    resolve_api_key,
    to_upstream_failure,
)
from cloche.telemetry import log


def settings(**given):
    return UpstreamConfig(models=("m",), base_url="http://127.0.0.1:9/v1", **given)


def test_a_key_is_taken_from_the_environment_without_the_line_end_that_files_have():
    assert resolve_api_key(settings(api_key="env:KEY"), {"KEY": "sk-1\n"}) == "sk-1"
    assert resolve_api_key(settings(api_key="sk-2"), {}) == "sk-2"
    assert resolve_api_key(settings(), {}) == ""


@pytest.mark.parametrize("environ", [{}, {"KEY": ""}, {"KEY": " "}])
def test_a_variable_that_is_not_set_is_named(environ):
    with pytest.raises(errors.InvalidConfig, match="environment variable KEY is not set"):
        UpstreamServer(settings(api_key="env:KEY"), environ)


@pytest.mark.parametrize(
    "given", [{"api_key": "a\nb"}, {"headers": {"x-a": "b\r\nc: d"}}, {"headers": {"x-a": "\ud800"}}]
)
def test_a_header_that_cannot_be_is_refused(given):
    with pytest.raises(errors.InvalidRequest, match="header"):
        UpstreamServer(settings(**given))


def test_the_server_names_missing_settings_and_does_not_start(own_data_dir, tmp_path):
    file = tmp_path / "cloche.toml"
    file.write_text('[[upstream]]\nmodels = ["gpt-*"]\nbase_url = "http://x/v1"\napi_key = "env:NOT_THERE"\n')
    command = [Path(sys.executable).with_name("cloche"), "serve", "--port", "0"]
    env = {**os.environ, "CLOCHE_CONFIG": str(file), "CLOCHE_DATA_DIR": str(own_data_dir)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "NOT_THERE is not set" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "a"}}', "a"),
        (b'{"error": "a"}', "a"),
        (b'{"object": "error", "message": "a"}', "a"),
        (b'[{"error": {"message": "a"}}]', "a"),
    ],
)
def test_errors_as_servers_write_them(body, message):
    said = parse_error(body)
    assert said is not None
    assert said["message"] == message


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"7", b"[" * 100_000, b'{"error": {}}', b'{"error": null}'])
def test_other_bodies_are_no_error(body):
    assert parse_error(body) is None


def test_words_of_an_upstream_are_bounded_and_without_the_key():
    error = to_upstream_failure(
        {"message": "key sk-1 " + "x" * 9999, "type": {"a": 1}, "code": 7, "param": None}, secret="sk-1"
    )
    assert "sk-1" not in str(error)
    assert len(str(error)) < 600
    assert (error.kind, error.reason, error.param) == ("server_error", "7", None)


async def test_a_key_in_a_header_is_not_told_either(upstream):
    upstream.script("header", [[HttpError(400, "your api-key abcdefgh-1 is odd")]])
    given = UpstreamConfig(models=("m",), base_url=upstream.url, headers={"Api-Key": "abcdefgh-1"})
    server = UpstreamServer(given)
    with pytest.raises(errors.UpstreamFailed, match=r"your api-key \*\*\* is odd"):
        async with server.post("/chat/completions", {"model": "header"}):
            pass
    await server.aclose()
    assert upstream.asked("header")[0].headers["api-key"] == "abcdefgh-1"


async def test_no_part_of_a_secret_is_told_wherever_it_stands(upstream):
    said = {
        "message": "x" * 480 + "sk-abcdefghijklmnop",
        "type": "of sk-abcdefghijklmnop",
        "code": "sk-abcdefghijklmnop",
    }
    upstream.script("parts", [[HttpError(400, {"error": {**said, "param": "a.sk-abcdefghijklmnop"}})]])
    given = UpstreamConfig(models=("m",), base_url=upstream.url, headers={"X-Auth": "Bearer sk-abcdefghijklmnop"})
    server = UpstreamServer(given)
    with pytest.raises(errors.UpstreamFailed) as caught:
        async with server.post("/chat/completions", {"model": "parts"}):
            pass
    await server.aclose()
    error = caught.value
    assert "sk-abcde" not in f"{error} {error.kind} {error.reason} {error.param}"
    assert (error.kind, error.reason, error.param) == ("of ***", "***", "a.***")


def test_longer_secrets_are_masked_first_and_short_ones_not():
    secrets = find_secrets(["Bearer abcdefgh-long", "abcdefgh", "short", "token=12345678; v=1"])
    assert mask_secrets("abcdefgh-long, abcdefgh, 12345678 and short", secrets) == "***, ***, *** and short"


async def cause(base_url: str) -> str:
    server = UpstreamServer(UpstreamConfig(models=("m",), base_url=base_url))
    with pytest.raises(errors.UpstreamFailed, match="cannot be reached"):
        async with server.post("/chat/completions", {"model": "m"}):
            pass
    with pytest.raises(errors.UpstreamFailed, match="cannot be reached"):
        await server.models()
    await server.aclose()
    posted, listed = list(log.recent)[-2:]
    assert posted.event == listed.event == "upstream.failed"
    return f"{posted.fields['cause']} {listed.fields['cause']}"


async def test_the_log_says_why_a_server_cannot_be_reached():
    assert await cause("http://127.0.0.1:9/v1") == "ConnectionRefusedError ConnectionRefusedError"
    assert await cause("http://nobody.invalid/v1") == "gaierror gaierror"


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "a..b"])
async def test_an_address_that_cannot_even_be_tried_is_an_upstream_that_cannot_be_reached(host):
    assert await cause(f"http://{host}/v1") in ("UnicodeError gaierror", "UnicodeError UnicodeError")


# -- streams and encodings that are not called by their names

STREAM = b'event: a\r\ndata: {"x": 1}\r\n\r\n'


@contextlib.asynccontextmanager
async def answering(*pieces: bytes, **headers: str):
    """A server that answers everything with this."""
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode())
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        server = UpstreamServer(UpstreamConfig(models=("m",), base_url=url))
        yield server
        await server.aclose()


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/octet-stream", "TEXT/EVENT-STREAM"])
@pytest.mark.parametrize("before", [b"", b": hello\n\n", b"\xef\xbb\xbf", b"\n\n\n", b"retry: 5\n\n"])
async def test_a_stream_is_recognised_under_any_content_type(kind, before):
    whole = before + STREAM
    async with answering(whole[:2], whole[2:], content_type=kind) as server, server.post("/x", {}) as answer:
        assert answer.is_stream
        assert [(event.name, event.data) async for event in answer.events()] == [("a", b'{"x": 1}')]


@pytest.mark.parametrize("blank", [[], [b" \n"], [b" "] * 40])
async def test_a_whole_answer_is_none(blank):
    async with answering(*blank, b'{"da', b'ta": 1}', content_type="x") as server, server.post("/x", {}) as answer:
        assert not answer.is_stream
        assert await answer.whole() == {"data": 1}


async def test_an_error_with_an_endless_body_is_reported_with_its_beginning(monkeypatch):
    monkeypatch.setattr(http, "ERROR_SECONDS", 0.1)
    done = asyncio.Event()

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 429 Too Many\r\ncontent-length: 1000\r\n\r\nslow down")
        await done.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        server = UpstreamServer(UpstreamConfig(models=("m",), base_url=url))
        with pytest.raises(errors.UpstreamFailed, match="slow down") as caught:
            async with server.post("/chat", {}):
                pass
        assert caught.value.status == 429
        done.set()
        await server.aclose()


async def test_a_compressed_body_is_read_or_its_encoding_named():
    async with (
        answering(gzip.compress(b'{"a": 1}'), content_encoding="gzip") as server,
        server.post("/x", {}) as answer,
    ):
        assert await answer.whole() == {"a": 1}
    async with answering(b"abc", content_encoding="br") as server:
        with pytest.raises(errors.UpstreamFailed, match="encoding that was not requested: content-encoding 'br'"):
            async with server.post("/x", {}):
                pass


async def test_a_header_can_come_from_the_environment(upstream):
    upstream.script("variable", [[HttpError(400, "your api-key abcdefgh-2 is odd")]])
    given = UpstreamConfig(models=("m",), base_url=upstream.url, headers={"Api-Key": "env:THE_KEY"})
    server = UpstreamServer(given, {"THE_KEY": "abcdefgh-2\n"})
    with pytest.raises(errors.UpstreamFailed) as caught:
        async with server.post("/chat/completions", {"model": "variable", "messages": []}):
            pass
    await server.aclose()
    assert upstream.asked("variable")[0].headers["api-key"] == "abcdefgh-2"
    assert "abcdefgh-2" not in str(caught.value)


@pytest.mark.parametrize("environ", [{}, {"THE_KEY": ""}, {"THE_KEY": "a\nb"}, {"THE_KEY": "é"}])
@pytest.mark.parametrize("given", [{"headers": {"api-key": "env:THE_KEY"}}, {"api_key": "env:THE_KEY"}])
def test_a_variable_without_a_value_that_a_header_can_have_is_a_mistake_of_the_operators(given, environ):
    with pytest.raises(errors.InvalidConfig, match=r"\[\[upstream\]\] of m"):
        UpstreamServer(settings(**given), environ)
