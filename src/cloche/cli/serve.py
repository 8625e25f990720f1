"""`cloche serve`: runs the server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import click
import uvloop

from cloche import errors
from cloche.api.auth import Gatekeeper, is_loopback
from cloche.app import LOCAL_ADMIN, ServerApp
from cloche.cli import load_command_config
from cloche.cli.hosting import bind_socket, check_tls, host_server, local_url, server_url, silence_uvicorn
from cloche.cli.token_keys import load_token_key_ids
from cloche.config import Config
from cloche.config.librechat import JWT_SECRET_VARIABLES
from cloche.engine.engine import Engine
from cloche.engine.operations.health import Health
from cloche.engine.quotas.quotas import Quotas
from cloche.linux import cpu_priority
from cloche.store.database import Database
from cloche.store.keys import StoredKeys
from cloche.telemetry import log

# Keys at the start of a server: the one set in the environment, or a first one, shown once.

API_KEY_VARIABLE = "CLOCHE_API_KEY"
MIN_KEY_CHARACTERS = 16
LONG_KEY_CHARACTERS = 32


def preset_key(environ: Mapping[str, str]) -> str | None:
    """The admin's key of the environment, if there is one. Raises InvalidConfig for one that could be guessed."""
    key = environ.get(API_KEY_VARIABLE, "")
    if not key:
        return None
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise errors.InvalidConfig(f"{API_KEY_VARIABLE} can have printable ASCII characters only, and no spaces")
    if len(key) < MIN_KEY_CHARACTERS:
        raise errors.InvalidConfig(
            f"{API_KEY_VARIABLE} has {len(key)} characters: use {MIN_KEY_CHARACTERS} at least, better `openssl rand "
            "-hex 20`"
        )
    if len(key) < LONG_KEY_CHARACTERS:
        click.echo(f"cloche: warning: {API_KEY_VARIABLE} is short; better is `openssl rand -hex 20`", err=True)
    return key


async def show_first_key(keys: StoredKeys, url: str) -> None:
    """Makes a first key where none was ever made and none is set, and prints it with lines to paste."""
    if keys.has_valid_key:
        return
    if await keys.list():
        click.echo("cloche: warning: every key was revoked or has expired: `cloche key add` adds a new one", err=True)
        return
    _, key = await keys.add("local", "admin", "first")
    scheme, _, place = url.rstrip("/").partition("://")
    click.echo(_FIRST_KEY_TEXT.format(key=key, url=url.rstrip("/"), with_key=f"{scheme}://cloche:{key}@{place}"))


_FIRST_KEY_TEXT = """\
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


STOP_SECONDS = 30.0
YOUNG_OBJECTS_LIMIT = 5000  # a hundred requests' worth, after which garbage is looked for
REFRESH_SECONDS = 2.0  # how soon a key or quota that another process changed is noticed
EXIT_FORCED = 1  # exit status


@click.command("serve")
@click.option("--host", help="Address to listen on; by default 127.0.0.1.")
@click.option("--port", type=int, help="Port to listen on, 0 for any; by default 8000.")
@click.option("--tls-cert", type=click.Path(), help="Certificate chain, PEM.")
@click.option("--tls-key", type=click.Path(), help="Its private key, PEM.")
@click.option("--public-url", help="Address at which clients reach the server, if it is behind a proxy.")
@click.option("--domain", help="{port}-{sandbox}.DOMAIN reaches a port of a sandbox.")
@click.option("--allow", metavar="HOST", multiple=True, help="Hosts that sandboxes can request; by default none.")
@click.option("--deny", metavar="HOST", multiple=True, help="Exceptions from --allow.")
@click.option("--packages", is_flag=True, default=None, help="Let pip, uv and npm in sandboxes install packages.")
@click.option("--insecure-no-auth", is_flag=True, help="Serve every program on this machine without a key.")
def command(
    insecure_no_auth: bool,
    allow: tuple[str, ...],
    deny: tuple[str, ...],
    packages: bool | None,
    **flags: str | int | None,
) -> None:
    """Serve sandboxes over HTTP, until SIGTERM or Ctrl-C."""
    network = {"network.allow": allow or None, "network.deny": deny or None, "packages.enabled": packages}
    config = load_command_config({**{f"server.{name}": value for name, value in flags.items()}, **network})
    log.level = "debug" if log.level == "debug" else "info"
    silence_uvicorn()
    _check_exposure(config, insecure_no_auth)
    check_tls(config.server)
    load_token_key_ids(config)
    preset = preset_key(os.environ)
    for secret in (API_KEY_VARIABLE, *JWT_SECRET_VARIABLES):
        os.environ.pop(secret, None)  # no program that is started from here needs it
    uvloop.run(_run_server(config, preset, no_auth=insecure_no_auth))


def _check_exposure(config: Config, no_auth: bool) -> None:
    server = config.server
    if is_loopback(server.host):
        return
    if no_auth:
        raise errors.InvalidConfig(
            f"--insecure-no-auth serves every client that can connect, so it requires a loopback address, not "
            f"{server.host}: leave one of the two out"
        )
    if not server.tls_cert:
        click.echo(
            f"cloche: warning: {server.host} without TLS: keys and code cross the network in the clear. Give "
            "--tls-cert and --tls-key, or put a proxy with TLS before it",
            err=True,
        )


async def _run_server(config: Config, preset: str | None, *, no_auth: bool) -> None:
    """Serves until a signal."""
    stop = _stop_signal()
    store = Path(config.data_dir)
    keys = StoredKeys(Database(store / "store.sqlite3"), preset)
    gatekeeper = Gatekeeper(None if no_auth else keys, LOCAL_ADMIN)
    async with contextlib.AsyncExitStack() as stack:
        bound = stack.enter_context(bind_socket(config.server))
        await stack.enter_async_context(keys)
        click.echo(f"data directory {config.data_dir} ({config.origins['data_dir']})")
        host = await stack.enter_async_context(host_server(config, keys, gatekeeper, bound=bound))
        url = server_url(config.server, bound)
        if not no_auth:
            # Divides the capacity, so that the first key cannot take all of it.
            host.engine.cell_supply.admission.share()
            await show_first_key(keys, config.server.public_url or local_url(url))
        host.app.ui.login.address = config.server.public_url or local_url(url)
        started = await _wait_until_started(stop, host.engine, host.health)
        if started:
            if host.engine.cell_supply.weighs_cells:  # else they would share this process's group and priority
                log.debug("server.precedence", taken=stack.enter_context(cpu_priority.raised_priority()))
            await _serve_until_stopped(stop, host.app, host.health, keys, host.engine.quotas, url)
    if not started:
        os._exit(0)  # does not wait for a thread that still builds a template; its remains are removed later


def _stop_signal() -> asyncio.Event:
    """An event set by SIGTERM or SIGINT. A second signal, or half a minute, ends the process on the spot."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            _force_exit("a second signal")
        log.info("server.stopping")
        stop.set()
        loop.call_later(STOP_SECONDS, _force_exit, f"still not stopped after {STOP_SECONDS:g} s")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


def _force_exit(why: str) -> None:
    log.warning("server.forced", why=why)
    os._exit(EXIT_FORCED)


async def _wait_until_started(stop: asyncio.Event, engine: Engine, health: Health) -> bool:
    """Whether sandboxes can be made; False if the server was stopped meanwhile.

    Raises the errors of `Health.check`.
    """

    async def start() -> None:
        log.info("server.capacity", **engine.cell_supply.admission.capacity_limits)
        await engine.cell_supply.warm(users=("user", "root"))
        await health.check()

    starting = asyncio.create_task(start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        return False
    starting.result()
    return True


def _freeze_garbage_collector() -> None:
    """Exempts all objects made so far from garbage collection: repeated scans would delay all requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_LIMIT, 4, 4)


async def _serve_until_stopped(
    stop: asyncio.Event, app: ServerApp, health: Health, keys: StoredKeys, quotas: Quotas, url: str
) -> None:
    watching = [
        create_watched_task("health", health.watch()),
        create_watched_task("refresh", _refresh_keys_and_quotas(keys, quotas)),
    ]
    app.system.accepting = True
    _freeze_garbage_collector()
    log.info("server.ready", url=url)
    link = app.ui.login.new_link()
    hint = "  (good once, for 15 minutes; `cloche ui` prints another)" if "#" in link else ""
    click.echo(f"ready {url}\nconsole {link}{hint}")
    await stop.wait()
    app.system.accepting = False
    for task in watching:
        task.cancel()
    await asyncio.wait(watching)


def create_watched_task(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Creates a task for the lifetime of the server; an earlier end is logged as an error."""

    def on_done(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            log.error("server.watch_ended", watch=name, error=repr(task.exception()))

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(on_done)
    return task


async def _refresh_keys_and_quotas(keys: StoredKeys, quotas: Quotas) -> None:
    """Reads the changes of other processes, until it is cancelled."""
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        await keys.try_refresh()
        await quotas.try_refresh()
