"""How each route is tried with ids that are somebody else's: its path, and what cases.py says is sent with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from tests.tenants.belongings import DOMAIN
from tests.tenants.cases import (
    CASES,
    FORM,
    FORM_HEADER,
    LISTS,
    NOTHING_FOREIGN,
    SANDBOXES,
    SNAPSHOTS,
    TEMPLATES,
    Case,
)
from tests.tenants.routes import ANY, WEBSOCKET, Known

HELD = "<their access_token>"
_TOKEN_HEADERS = {
    "X-EXECD-ACCESS-TOKEN": "execd_token",
    "OPENSANDBOX-EGRESS-AUTH": "egress_token",
    "OpenSandbox-Secure-Access": "port_token",
}

_PARAM = re.compile(r"\{(\w+)(?::\w+)?\}")


class Try(NamedTuple):
    """A request with places for ids."""

    method: str
    path: str
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()


_FILLINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "api": {
        "id": SANDBOXES,
        "context": ("context",),
        "checkpoint": ("checkpoint",),
        "process": ("process", "terminal"),
        "run": ("run",),
        "/snapshots/{ref": SNAPSHOTS,
        "/volumes/{ref": ("volume", "volume_name"),
    },
    "e2b": {
        "/sandboxes/{id": SANDBOXES,
        "/volumes/{id": ("volume", "volume_name"),
        "/volumecontent/{id": ("volume",),
        "/template-files/{id": ("template",),
        "/templates/{id": ("template", "template_name"),
        "hash": ("hash",),
        "build": ("build",),
        "name": TEMPLATES,
        "rest": ("template",),
    },
    "49999": {"id": ("kernel",)},
    "v1": {
        "/responses/{id": ("response", "background", "streaming"),
        "/conversations/{id": ("conversation",),
        "item": ("conversation_item", "item"),
        "container": ("container", "expired_container"),
        "/{container}/files/{id": ("file_of_container", "file", "file_of_expired_container"),
        "/v1/files/{id": ("file", "file_of_container"),
        "model": ("template_name",),
        "rest": ("response",),
    },
    "ui": {
        "/sandboxes/{id": SANDBOXES,
        "process": ("process", "terminal"),
        "/requests/{id": ("request", "response", "container"),
        "template": ("template", "template_name"),
        "/built/{template}/{id": ("build",),
        "/builds/{id": ("build",),
    },
    "open-terminal": {
        "process": ("terminal_process",),
        "session": ("terminal_session",),
        "notebook": ("terminal_notebook",),
        "path": (),
        "rest": ("agent",),
    },
    "aca": {"pool": ("template_name",), "name": ("aca_file",)},
    "jupyter": {
        "sandbox": SANDBOXES,
        "kernel": ("jupyter_kernel",),
        "session": ("jupyter_session",),
        "name": ("template_name",),
        "path": (),
    },
    "opensandbox": {
        "id": ("cell", *SANDBOXES[:-1]),
        "port": (),
        "/snapshots/{ref": SNAPSHOTS,
        "context": ("context",),
        "template": ("template", "template_name"),
        "command": ("command",),
        "session": ("bash_session",),
        "name": ("credential",),
        "kind": (),
        "rest": ("context",),
    },
}
RUN_APIS = ("dify", "fastgpt", "piston", "ragflow", "sandboxfusion")
PREFIXES = {
    "opensandbox": "/opensandbox/v1",
    "librechat": "/librechat/v1",
    **{name: f"/{name}" for name in ("aca", "e2b", "jupyter", "open-terminal", *RUN_APIS)},
}
_LITERALS = {"path": "f.txt", "port": "44772", "kind": "credentials", "uid": "0", "gid": "0", "program_port": "8000"}
_TOGETHER: dict[str, list[dict[str, str]]] = {
    "librechat": [
        {"session": f"<{kind}session>", "file": f"<{kind}object>"} for kind in ("", "users_", "agents_", "exec_")
    ]
}
"""Of planes whose ids only mean something in pairs."""

_REACHES = {"librechat": ("", "kind=agent&id=<agent>", "kind=user&id=ann-<agent>", "kind=skill&id=<agent>&version=1")}
_TOKENS: tuple[dict[str, str], ...] = (
    {},
    {"x-access-token": "<own access_token>", "e2b-traffic-access-token": "<own traffic_token>"},
    {"x-access-token": "0" * 64, "e2b-traffic-access-token": "0" * 64},
)


# What a page of the attacker's session sends along, and what pages are asked for, or told, beside their paths.
SESSION = (("cookie", "<own console_session>"), ("x-cloche-csrf", "<own csrf>"), ("origin", "<own origin>"))
_ASKED_OF_PAGES = (
    "",
    "id=<request>&before=<request>",
    "before=<request>",
    "q=<running>&id=<running>&sandbox=<running>&container=<container>",
    "owner=<owner>",
    "ref=<template>&template=<template>&before=<template>&after=<template_name>",
    "sandbox=<paused>&snapshot=<snapshot>&volume=<volume>&context=<context>",
)
_TOLD_PAGES = ({"ids": ["<running>"]}, {"ids": ["<asleep>"]}, {"ref": "<template>"}, {"sandbox": "<running>"})

_STATES = re.compile(r"<(paused|asleep|killed|expired)>")


def is_core(attempt: Try) -> bool:
    """Whether it is tried in every run: with one sandbox of each kind, and where not everybody is told no."""
    written = attempt.path + repr(attempt.headers)
    if _STATES.search(written) or attempt.method == ANY or "/proxy/44772/" in attempt.path:
        return False
    if attempt.path.endswith("/exec"):  # each of them runs a program
        return "<exec_session>" in repr(attempt.body)
    one = ("/proxy/", "<cell>") if "/proxy/" in written else (f".{DOMAIN}", "<private>")
    at_port = one[0] in written or "e2b-sandbox-id" in written
    return not at_port or one[1] in written


class NotTried(Exception):
    """A route that nobody said anything about."""


def tries(route: Known) -> Iterator[Try]:
    """Raises NotTried."""
    if route.name in NOTHING_FOREIGN or (route.name in LISTS and _cases_of(route) is None):
        return
    if route.plane == "ui":
        yield from _at_console(route)
        return
    cases = _cases_of(route)
    has_ids = _PARAM.search(route.path) is not None
    if route.plane == "admin":
        cases = [Case({"owner": "<owner>"})]  # nobody looks at it: the answer is no
    elif cases is None:
        absent = route.plane == "opensandbox"  # where one handler says no to every method
        if not has_ids and not absent and route.method != ANY:
            raise NotTried(f"say how to try this route: {route.name}")
        if route.method in ("POST", "PUT", "PATCH") and not absent:
            raise NotTried(f"say what is sent to this route: {route.name}")
        cases = [Case()]
    for path in _paths(route):
        for case in cases:
            yield from _addressed(route, path, case)


_OWN_TOKENS = {
    "/volumecontent/": (("authorization", "Bearer <own volume_token>"),),
    "/proxy/18080/": (("OPENSANDBOX-EGRESS-AUTH", "<own egress_token>"),),
    "/proxy/44772/": (("X-EXECD-ACCESS-TOKEN", "<own execd_token>"),),
}


def own_try(route: Known) -> Try:
    """A request of the owner's own, with an id of each kind that the path wants. Its body is the caller's affair."""
    path, case = next(_paths(route)), (_cases_of(route) or [Case()])[-1]
    for part, headers in {"/ui/": SESSION, **_OWN_TOKENS}.items():
        if part in path:
            case = case._replace(headers=headers)
    found = list(_addressed(route, path, case))
    at_port = [each for each in found if "<own access_token>" in str(each.headers) and "<private>" in str(each.headers)]
    return (at_port or found)[0]


def _at_console(route: Known) -> Iterator[Try]:
    for path in _paths(route):
        if route.method == "GET":
            asked = [f"{path}?{each}" if each else path for each in _ASKED_OF_PAGES]
            yield from (Try("GET", each, None, SESSION) for each in asked if "<" in each)
        else:
            bodies = ({}, {"minutes": 5.0}) if "<" in path else _TOLD_PAGES  # what the path names is enough
            yield from (Try(route.method, path, body, SESSION) for body in bodies)


def behind_console(attempt: Try) -> Try | None:
    """The same by the console's way to the dialects; None where there is none."""
    if not attempt.path.startswith(("/api/", "/v1/", "/admin/")) or any(name == "host" for name, _ in attempt.headers):
        return None
    return attempt._replace(path="/ui" + attempt.path, headers=(*attempt.headers, *SESSION))


def _cases_of(route: Known) -> list[Case] | None:
    return CASES.get(route.plane, {}).get(f"{route.method} {route.path}")


def _addressed(route: Known, path: str, case: Case) -> Iterator[Try]:
    if route.plane in ("49983", "49999"):
        yield from _at_port(route, path, case)
        return
    prefix = PREFIXES.get(route.plane, "")
    for query in _REACHES.get(route.plane, ("",)) if route.method in ("GET", "DELETE") else ("",):
        asked = "&".join(each for each in (case.query, query) if each)
        yield Try(route.method, f"{prefix}{path}{'?' if asked else ''}{asked}", case.body, case.headers)
    if "/proxy/" in path:
        for header, kind in _TOKEN_HEADERS.items():
            for token in (f"<own {kind}>", "0" * 64):
                yield Try(route.method, prefix + path, case.body, ((header, token),))


def _at_port(route: Known, path: str, case: Case) -> Iterator[Try]:
    """By headers with each kind of token, and by the name of a host."""
    asked = f"{path}?{case.query}" if case.query else path
    for kind in SANDBOXES:
        for tokens in (*_TOKENS, *([] if kind == "private" else [{"x-access-token": HELD}])):
            named = {"e2b-sandbox-id": f"<{kind}>", "e2b-sandbox-port": route.plane, **tokens}
            yield Try(route.method, f"/e2b{asked}", case.body, (*case.headers, *named.items()))
        host = (("host", f"{route.plane}-<{kind}>.{DOMAIN}"),)
        yield Try(route.method, asked, case.body, (*case.headers, *host))


def _paths(route: Known) -> Iterator[str]:
    """The route's path with `<kind>` for each of its parameters, for each kind that could be meant."""
    if route.plane in _TOGETHER and _PARAM.search(route.path):
        for together in _TOGETHER[route.plane]:
            yield _PARAM.sub(lambda match, chosen=together: chosen[match[1]], route.path)  # type: ignore[misc]
        return
    names = [(match[0], _kinds(route, match)) for match in _PARAM.finditer(route.path)]
    first = {written: kinds[0] for written, kinds in names}
    yield _filled(route.path, first)
    for written, kinds in names:
        for kind in kinds[1:]:
            yield _filled(route.path, {**first, written: kind})


def _kinds(route: Known, match: re.Match[str]) -> tuple[str, ...]:
    """Raises NotTried for a parameter that nobody said anything about."""
    if match[1] in _LITERALS:
        return (_LITERALS[match[1]],)
    if route.plane == "admin":
        return ("<key>", "<owner>", "<response>")
    known = _FILLINGS.get(route.plane, {})
    before = route.path[: match.start()] + "{" + match[1]
    for name, kinds in known.items():
        if name == match[1] or ("{" in name and before.endswith(name)):
            return tuple(f"<{kind}>" for kind in kinds)
    raise NotTried(f"say which ids could be meant by {match[0]}: {route.name}")


def _filled(path: str, chosen: dict[str, str]) -> str:
    for written, kind in chosen.items():
        path = path.replace(written, kind)
    return path


def sockets() -> Iterator[Try]:
    """WebSockets to programs in sandboxes, which have no route."""
    for kind in SANDBOXES:
        for tokens in _TOKENS:
            named = {"e2b-sandbox-id": f"<{kind}>", "e2b-sandbox-port": "8000", **tokens}
            yield Try(WEBSOCKET, "/", headers=tuple(named.items()))
        yield Try(WEBSOCKET, "/", headers=(("host", f"8000-<{kind}>.{DOMAIN}"),))


def ports() -> Iterator[Try]:
    """Requests to programs in sandboxes."""
    for each in sockets():
        yield each._replace(method="GET")
        yield each._replace(method="POST", body={"a": "b"})


def signed() -> Iterator[Try]:
    """File URLs that name no sandbox."""
    for method, path in chain.from_iterable((("GET", each), ("POST", each)) for each in ("/files", "/e2b/files")):
        for query in (
            "path=/home/user/other.txt&signature=<signature>",
            "path=/home/user/g.txt&username=root&signature=<signature>",
        ):
            yield Try(method, f"{path}?{query}", None if method == "GET" else FORM, tuple(FORM_HEADER.items()))
