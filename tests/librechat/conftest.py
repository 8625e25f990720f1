"""A server that knows keys and LibreChat's tokens, and clients of whoever asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from tests.conftest import RunningServer, serving, with_template
from tests.librechat.minting import claims, jwk, mint, new_ed25519

from cloche.config import Config
from cloche.engine.quotas.capacity import Admission
from cloche.model import Template

SIGNING_KEY = new_ed25519()

User = Callable[..., httpx2.Client]


@pytest.fixture(scope="session")
def librechat_server(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It has a store of its own. Tokens that SIGNING_KEY signed are believed."""
    place = with_template(tmp_path_factory.mktemp("librechat") / "data", template)
    with serving(place, env={"CODEAPI_JWT_JWKS_JSON": json.dumps({"keys": [jwk(SIGNING_KEY)]})}) as running:
        yield running


def client_with(server: RunningServer, headers: dict[str, str]) -> httpx2.Client:
    return httpx2.Client(base_url=f"{server.url}/librechat/v1", headers=headers, timeout=60)


@pytest.fixture(scope="session")
def client(librechat_server: RunningServer) -> Iterator[httpx2.Client]:
    """A LibreChat with a key: nobody there is told apart."""
    with client_with(librechat_server, {"x-api-key": librechat_server.key}) as made:
        yield made


@pytest.fixture(scope="session")
def stranger(librechat_server: RunningServer) -> Iterator[httpx2.Client]:
    """Somebody with a key of another owner."""
    admin = {"authorization": f"Bearer {librechat_server.key}"}
    made = httpx2.post(f"{librechat_server.url}/admin/keys", headers=admin, json={"owner": "stranger"}).json()
    with client_with(librechat_server, {"x-api-key": made["key"]}) as theirs:
        yield theirs


@pytest.fixture
def user(librechat_server: RunningServer) -> Iterator[User]:
    """`user("ann", "acme")` is the client of a user whom LibreChat vouches for, for five minutes."""
    with ExitStack() as stack:

        def user(name: str, tenant: str = "acme") -> httpx2.Client:
            token = mint(SIGNING_KEY, claims(name, tenant_id=tenant))
            return stack.enter_context(client_with(librechat_server, {"authorization": f"Bearer {token}"}))

        yield user


def no_engine(config: Config) -> Any:
    """In the place of an engine, where no request gets as far as running code: who may enter is all that it knows."""
    return SimpleNamespace(cell_supply=SimpleNamespace(admission=Admission(config.capacity)))
