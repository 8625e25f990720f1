"""A server with two owners: one who has something of every kind, and one who wants it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.conftest import RunningServer, serving, with_template
from tests.librechat.minting import jwk, new_ed25519
from tests.tenants.belongings import DOMAIN, PATIENCE, Belongings
from tests.tenants.routes import Known, all_routes
from tests.tenants.wire import Wire

from cloche.model import Template


@pytest.fixture(scope="session")
def routes(tmp_path_factory: pytest.TempPathFactory) -> list[Known]:
    return all_routes(tmp_path_factory.mktemp("routes"))


class World(NamedTuple):
    server: RunningServer
    victim: Belongings
    attacker: Belongings


@pytest.fixture(scope="session")
def world(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    place = with_template(tmp_path_factory.mktemp("tenants") / "data", template)
    signing_key = new_ed25519()
    env = {"CODEAPI_JWT_JWKS_JSON": json.dumps({"keys": [jwk(signing_key)]}), **PATIENCE}
    with serving(place, "--domain", DOMAIN, "--allow", "api.example.com", env=env) as server:
        admin = Wire(server.url, {"x-api-key": server.key})
        owners = []
        for name in ("victim", "attacker"):
            owner = f"{name}-{secrets.token_hex(4)}"
            key = admin.made("POST", "/admin/keys", {"owner": owner, "name": f"key-of-{owner}"})
            owners.append(Belongings(server.url, key["key"], owner, signing_key).gather())
            owners[-1].ids["key"] = key["id"]
            owners[-1].ids["request"] = admin.made("GET", f"/admin/requests?owner={owner}")["requests"][0]["record"]
        try:
            yield World(server, *owners)
        finally:
            for each in owners:
                each.close()
            admin.close()
