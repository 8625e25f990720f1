"""Clients of the workspaces: Open WebUI's proxy sends a key, the user's id and the chat's."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import httpx2
import pytest
from tests.conftest import RunningServer


def open_client(url: str, key: str, user: str, chat: str = "") -> httpx2.Client:
    headers = {"Authorization": f"Bearer {key}", "X-User-Id": user}
    if chat:
        headers["X-Session-Id"] = chat
    return httpx2.Client(base_url=url, headers=headers, timeout=60)


@pytest.fixture(scope="session")
def user() -> str:
    return f"user-{secrets.token_hex(4)}"


@pytest.fixture(scope="session")
def client(server: RunningServer, user: str) -> Iterator[httpx2.Client]:
    """A chat of a user."""
    with open_client(server.url + "/open-terminal", server.key, user, "chat-1") as found:
        yield found
