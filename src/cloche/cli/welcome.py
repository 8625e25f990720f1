"""Keys at the start of a server: the one that the environment sets, or a first one, shown once."""

from __future__ import annotations

from collections.abc import Mapping

import click

from cloche import errors
from cloche.store.keys import StoredKeys

VARIABLE = "CLOCHE_API_KEY"
LEAST_CHARACTERS = 16
LONG_CHARACTERS = 32


def preset_key(environ: Mapping[str, str]) -> str | None:
    """The admin's key that the environment sets, if it does. Raises InvalidConfig for one that could be guessed."""
    key = environ.get(VARIABLE, "")
    if not key:
        return None
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise errors.InvalidConfig(f"{VARIABLE} can have printable ASCII characters only, and no spaces")
    if len(key) < LEAST_CHARACTERS:
        raise errors.InvalidConfig(
            f"{VARIABLE} has {len(key)} characters: use {LEAST_CHARACTERS} at least, better `openssl rand -hex 20`"
        )
    if len(key) < LONG_CHARACTERS:
        click.echo(f"cloche: warning: {VARIABLE} is short; better is `openssl rand -hex 20`", err=True)
    return key


async def welcome(keys: StoredKeys, url: str) -> None:
    """Makes a first key where none was ever made and none is set, and shows it with lines to paste."""
    if keys.any_valid:
        return
    if await keys.list():
        click.echo("cloche: warning: every key was revoked or has expired: `cloche key add` makes a new one", err=True)
        return
    _, key = await keys.add("local", "admin", "first")
    scheme, _, place = url.rstrip("/").partition("://")
    click.echo(_WELCOME.format(key=key, url=url.rstrip("/"), with_key=f"{scheme}://cloche:{key}@{place}"))


_WELCOME = """\
The first key of this server, an admin's. It is shown this once; only its hash is kept.

    {key}

E2B's SDKs for Python and JavaScript:

    export E2B_API_KEY={key} E2B_API_URL={url}/e2b E2B_SANDBOX_URL={url}/e2b

OpenAI's SDKs (the code interpreter, containers, files; the model cloche/echo answers without any upstream):

    export OPENAI_API_KEY={key} OPENAI_BASE_URL={url}/v1

Agents that speak MCP, such as Claude Code (others: docs/dialects/mcp.md):

    claude mcp add --transport http cloche {url}/mcp --header "Authorization: Bearer {key}"

LiteLLM's interceptor, as its sandbox provider:

    export OPEN_SANDBOX_API_KEY={key} OPEN_SANDBOX_API_BASE={url}/opensandbox/v1

LibreChat, in its environment:

    LIBRECHAT_CODE_BASEURL={with_key}/librechat/v1

Agents that speak MCP, here Claude Code:

    claude mcp add --transport http cloche {url}/mcp --header "Authorization: Bearer {key}"

Cloche's own library and command line:

    export CLOCHE_API_KEY={key} CLOCHE_URL={url}
"""
