"""Speaking to the servers of a data directory, over their control sockets.

The socket's file lets its owner in (mode 0600 in a directory of mode 0700), so no key is needed: whoever may open it is
the server's admin, with the owner "local".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx2

from cloche import errors
from cloche.cli import OUR_FAILURE
from cloche.config import Config
from cloche.engine.instance import live_control_sockets, unreadable

ANSWER_SECONDS = 30.0
COPY_SECONDS = 600.0  # for what has a sandbox's files written to a disk, or read from one


def no_server(config: Config) -> errors.Unavailable:
    """For a command that is for a server."""
    return errors.Unavailable(f"no server runs in the data directory {config.data_dir}: `cloche serve` starts one")


def sockets(config: Config) -> list[Path]:
    """The control sockets of all live servers of this data directory, the newest server's first.

    Raises Unavailable where whoever asks may not look.
    """
    return live_control_sockets(Path(config.data_dir) / "run")


def existing(config: Config) -> Path:
    """The data directory, for a command that would find nothing in one that was mistyped. Raises NotFound."""
    place = Path(config.data_dir)
    try:
        os.scandir(place).close()
    except FileNotFoundError:
        raise errors.NotFound(f"there is no data directory {place}: name it with --data-dir") from None
    except OSError as error:
        raise unreadable(place, error) from None
    return place


@contextmanager
def connected(config: Config) -> Iterator[httpx2.Client | None]:
    """A client of the newest live server; None where no server runs."""
    found = sockets(config)
    if not found:
        yield None
        return
    with client_of(found[0]) as client:
        yield client


@contextmanager
def client_of(socket: Path, seconds: float = ANSWER_SECONDS) -> Iterator[httpx2.Client]:
    """A client of the server with that control socket. It asks for paths, such as `/api/v1/sandboxes`."""
    with short_path(socket) as path:
        transport = httpx2.HTTPTransport(uds=path)
        with httpx2.Client(transport=transport, base_url="http://localhost", timeout=seconds) as client:
            yield client


def ask_around(config: Config, method: str, path: str, body: Any = None, *, seconds: float = ANSWER_SECONDS) -> Any:
    """As `ask`, of whichever live server knows what the path names.

    Raises Unavailable where no server runs, and what the last one says, if none of them has it.
    """
    found = sockets(config)
    if not found:
        raise no_server(config)
    for socket in found[:-1]:
        try:
            with client_of(socket, seconds) as client:
                return ask(client, method, path, body)
        except errors.NotFound:
            continue
    with client_of(found[-1], seconds) as client:
        return ask(client, method, path, body)


@contextmanager
def going_on() -> Iterator[None]:
    """Around what a server goes on with when whoever asked has left: an interrupt of ours says so."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("cloche: interrupted; the server goes on with what it was asked for", err=True)
        raise


def do_each(ids: Sequence[str], work: Callable[[str], object], done: str) -> None:
    """Does it with each, and says so; one that fails is named, and keeps no other from it.

    Ends the command with our status if any has failed. A single one's error is raised.
    """
    failed = 0
    for id in ids:
        try:
            with going_on():
                work(id)
            click.echo(f"{done} {id}")
        except errors.ClocheError as error:
            if len(ids) == 1:
                raise
            failed += 1
            click.echo(f"cloche: {id}: {error}", err=True)
    if failed:
        click.get_current_context().exit(OUR_FAILURE)


@contextmanager
def short_path(socket: Path) -> Iterator[str]:
    """A path of that socket which is valid here and for now: the kernel takes 107 characters, a data directory more."""
    directory = os.open(socket.parent, os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{socket.name}"
    finally:
        os.close(directory)


def ask(client: httpx2.Client, method: str, path: str, body: Any = None) -> Any:
    """What the server answers, decoded from JSON; None for an empty answer.

    Raises Unavailable where it does not answer, and an error with its message where it answers with one.
    """
    try:
        response = client.request(method, path, json=body)
    except httpx2.HTTPError as error:
        raise errors.Unavailable(f"the server does not answer on its control socket: {error}") from None
    if not response.is_success:
        raise error_of(response)
    return response.json() if response.content else None


def error_of(response: httpx2.Response) -> errors.ClocheError:
    """The error that a response of ours tells of."""
    from cloche.protocol.responses import error_in  # here: it takes a while to import

    return error_in(response.content, response.status_code)
