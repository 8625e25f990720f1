"""uvicorn's internals are as `cloche.cli.connection` and `cloche.cli.hosting` expect them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from cloche.cli.connection import CoalescingTransport, HttpConnection, WebSocketConnection
from cloche.cli.hosting import UvicornListener

REMEDY = (
    f"uvicorn {uvicorn.__version__} differs from the version that src/cloche/cli/connection.py and hosting.py were "
    "written for: read its changes, adapt these modules and this test, then widen the range in pyproject.toml"
)

METHODS: dict[type, dict[str, str]] = {
    HttpToolsProtocol: {
        "__init__": "config, server_state, app_state, _loop",
        "connection_made": "transport",
        "connection_lost": "exc",
        "data_received": "data",
        "on_message_begin": "",
        "on_header": "name, value",
        "on_headers_complete": "",
        "on_body": "body",
        "on_message_complete": "",
        "handle_websocket_upgrade": "",
        "send_400_response": "msg",
    },
    WebSocketsSansIOProtocol: {
        "__init__": "config, server_state, app_state, _loop",
        "connection_lost": "exc",
    },
    uvicorn.Server: {"__init__": "config", "capture_signals": "", "serve": "sockets"},
}
"""The methods that are overridden or called, with their parameters."""

SUBCLASSES = {
    HttpConnection: HttpToolsProtocol,
    WebSocketConnection: WebSocketsSansIOProtocol,
    UvicornListener: uvicorn.Server,
}


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """An application."""


def config() -> uvicorn.Config:
    return uvicorn.Config(nothing, loop="none", lifespan="off", log_config=None)


def new_instances() -> dict[type, object]:
    """One instance of each class of uvicorn's that is subclassed or changed."""
    cycle: dict[str, Any] = dict.fromkeys(inspect.signature(RequestResponseCycle).parameters)
    return {
        HttpToolsProtocol: HttpToolsProtocol(config(), ServerState(), {}),
        WebSocketsSansIOProtocol: WebSocketsSansIOProtocol(config(), ServerState(), {}),
        uvicorn.Server: uvicorn.Server(config()),
        RequestResponseCycle: RequestResponseCycle(**cycle),
    }


@pytest.mark.parametrize(
    ("base", "name"), [(base, name) for base in METHODS for name in METHODS[base]], ids=lambda value: str(value)
)
def test_a_method_has_the_parameters_that_are_expected(base: type, name: str) -> None:
    method: Callable[..., Any] | None = vars(base).get(name)
    assert method is not None, f"{base.__name__}.{name} is gone. {REMEDY}"
    _, *parameters = inspect.signature(method).parameters
    assert ", ".join(parameters) == METHODS[base][name], f"{base.__name__}.{name}. {REMEDY}"


@pytest.mark.parametrize("ours", SUBCLASSES)
def test_no_member_of_ours_hides_one_of_uvicorn_by_accident(ours: type) -> None:
    """Every name that both have is in the table of methods."""
    base = SUBCLASSES[ours]
    theirs = {name for name in dir(base) if not hasattr(object, name)} | set(vars(_new(base)))
    own = {name for name in vars(ours) if not name.startswith("__")} | _assigned_names(ours)
    assert own & theirs <= set(METHODS[base]), f"{ours.__name__} and {base.__name__} share names. {REMEDY}"


def _new(base: type) -> object:
    async def make() -> object:  # they look for the running loop
        return new_instances()[base]

    return asyncio.run(make())


def _assigned_names(ours: type) -> set[str]:
    """The attributes that an `__init__` of ours adds."""
    source = inspect.getsource(vars(ours)["__init__"]) if "__init__" in vars(ours) else ""
    return set(re.findall(r"^ +self\.(\w+)\b[^=(]*= ", source, re.MULTILINE))


@pytest.mark.parametrize(
    ("base", "names"),
    [
        (HttpToolsProtocol, "transport loop cycle scope client"),
        (WebSocketsSansIOProtocol, "handshake_initiated"),
        (RequestResponseCycle, "transport response_complete more_body"),
        (uvicorn.Server, "started should_exit"),
    ],
)
def test_the_attributes_that_are_used_are_there(base: type, names: str) -> None:
    missing = set(names.split()) - set(vars(_new(base)))
    assert not missing, f"{base.__name__} has no {', '.join(sorted(missing))}. {REMEDY}"


def test_the_parser_does_not_call_uvicorn_for_chunks() -> None:
    """`on_chunk_header` is ours alone: it calls no method of uvicorn's."""
    assert not hasattr(HttpToolsProtocol, "on_chunk_header"), REMEDY


def test_a_response_writes_through_our_transport_only() -> None:
    """Another way to write, such as `writelines`, would not be joined with the head."""
    used = set(re.findall(r"self\.transport\.(\w+)", inspect.getsource(RequestResponseCycle)))
    assert used == {"write", "close", "is_closing"}, REMEDY
    assert {"write", "close"} <= set(vars(CoalescingTransport))


def test_the_texts_that_are_not_logged_are_those_of_uvicorn() -> None:
    for text in ("without completing response", "without starting response"):
        assert text in inspect.getsource(httptools_impl), REMEDY


def test_status_lines_are_bytes_by_status() -> None:
    assert httptools_impl.STATUS_LINE[431] == b"HTTP/1.1 431 Request Header Fields Too Large\r\n", REMEDY


async def test_signals_are_captured_in_a_context_manager_that_is_replaced() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(uvicorn.Server.capture_signals(uvicorn.Server(config())))
    assert "capture_signals" in inspect.getsource(uvicorn.Server.serve), REMEDY


def test_the_version_is_bounded() -> None:
    """A release that was not tested must not be installed: it could change what is subclassed."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (needed,) = (each for each in project["dependencies"] if re.match(r"uvicorn\b", each))
    assert re.fullmatch(r"uvicorn>=\d+\.\d+,<\d+\.\d+", needed)
