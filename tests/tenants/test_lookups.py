"""How long an answer takes tells nothing either: the store is asked the same for what is foreign as for what never was.

No clock decides that. The server runs in this process, and every statement that it sends to its store is seen.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import with_template
from tests.librechat.minting import jwk, new_ed25519
from tests.tenants.belongings import DOMAIN, PATIENCE, Belongings
from tests.tenants.matrix import Pair, Sent, pairs
from tests.tenants.routes import Known
from tests.tenants.test_matrix import attempts
from tests.tenants.tries import is_core
from tests.tenants.wire import Wire

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.app import LOCAL_ADMIN
from cloche.cli.hosting import bind_socket, host_server, server_url
from cloche.config import load_config
from cloche.model import Template
from cloche.store import database
from cloche.store.keys import StoredKeys

pytestmark = pytest.mark.long

KEY = "e2b_" + secrets.token_hex(20)
STATES = ("paused", "asleep", "killed", "expired")


class Seen(NamedTuple):
    victim: Belongings
    attacker: Belongings
    statements: list[str]


@pytest.fixture(scope="module")
def seen(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    place = with_template(tmp_path_factory.mktemp("lookups") / "data", template)
    signing_key = new_ed25519()
    environ = {"CODEAPI_JWT_JWKS_JSON": json.dumps({"keys": [jwk(signing_key)]}), **PATIENCE}
    with pytest.MonkeyPatch.context() as patch:
        statements = _traced(patch)
        with _serving_here(place, environ) as url:
            admin = Wire(url, {"x-api-key": KEY})
            owners = []
            for owner in ("victim-of-lookups", "attacker-of-lookups"):
                made = admin.made("POST", "/admin/keys", {"owner": owner})
                owners.append(Belongings(url, made["key"], owner, signing_key).gather())
                owners[-1].ids["key"] = made["id"]
                asked = f"/admin/requests?owner={owner}"
                owners[-1].ids["request"] = admin.made("GET", asked)["requests"][0]["record"]
            yield Seen(*owners, statements)
            for each in owners:
                each.close()


def _traced(patch: pytest.MonkeyPatch) -> list[str]:
    """What the store is asked, by whatever part of the server."""
    statements: list[str] = []
    connect = database._open_connection

    def traced(path: Path):
        connection = connect(path)
        connection.set_trace_callback(statements.append)
        return connection

    patch.setattr(database, "_open_connection", traced)
    return statements


@contextmanager
def _serving_here(place: Path, environ: dict[str, str]) -> Iterator[str]:
    flags = {"data_dir": str(place), "server.port": 0, "server.domain": DOMAIN, "network.allow": ("api.example.com",)}
    config = load_config(None, environ, flags)
    ready, stop, told = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        keys = StoredKeys(database.Database(place / "store.sqlite3"), KEY)
        with bind_socket(config.server) as bound:
            async with keys, host_server(config, keys, Gatekeeper(keys, LOCAL_ADMIN), bound=bound) as host:
                await host.engine.cell_supply.warm(users=("user", "root"))
                told.extend((server_url(config.server, bound), asyncio.get_running_loop()))
                ready.set()
                await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except errors.ClocheError as error:
            told.append(error)
        ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    if isinstance(told[0], errors.IsolationUnavailable):
        pytest.skip(str(told[0]))
    try:
        yield told[0]
    finally:
        told[1].call_soon_threadsafe(stop.set)
        thread.join()


def test_the_store_is_queried_alike_for_foreign_and_unknown_ids(seen: Seen, routes: list[Known]):
    tried = [each for each in attempts(routes) if is_core(each) or _names_another_state(each.path, each.headers)]
    told = [
        f"{pair.attempt} {pair.own}\n  {foreign}\n  {absent}"
        for attempt in tried
        for pair in pairs(attempt, seen.victim, seen.attacker)
        for foreign, absent in [_lasting_difference(seen, pair)]
        if foreign != absent
    ]
    assert not told, f"{len(told)}:\n" + "\n".join(told[:5])


def _names_another_state(path: str, headers: tuple[tuple[str, str], ...]) -> bool:
    """Of all routes that take one, a few: they all ask in the same two ways."""
    named = any(f"<{state}>" in path + repr(headers) for state in STATES)
    return named and (path.endswith((">", "/pause", "/connect", "/envs", "/contexts")) or "/proxy/" in path)


def _lasting_difference(seen: Seen, pair: Pair) -> tuple[list[str], list[str]]:
    """What the server does by itself at the same moment is no difference that lasts."""
    for _ in range(4):
        foreign, absent = (_asked(seen, each) for each in (pair.foreign, pair.absent))
        if foreign == absent:
            break
    return foreign, absent


def _asked(seen: Seen, sent: Sent) -> list[str]:
    """What the store was asked to answer that, with a word in the place of each value."""
    del seen.statements[:]
    seen.attacker.wire.ask(*sent[:4])
    return [
        re.sub(r"'(?:[^']|'')*'|\b\d+(\.\d+)?\b", "?", each)
        for each in list(seen.statements)
        if each.lstrip().upper().startswith("SELECT")
    ]
