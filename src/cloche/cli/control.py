"""Requests to the servers of a data directory, over their control sockets.

The socket's file lets its owner in (mode 0600 in a directory of mode 0700), so no key is needed: every
process that may open it is the server's admin, with the owner "local".
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
from cloche.cli import EXIT_CLOCHE_FAILED
from cloche.config import Config
from cloche.engine.instance import live_control_sockets

ANSWER_SECONDS = 30.0
COPY_SECONDS = 600.0  # for requests that write a sandbox's files to a disk, or read them from one


def no_server_error(config: Config) -> errors.Unavailable:
    """The error of a command that needs a running server."""
    return errors.Unavailable(f"no server runs in the data directory {config.data_dir}: `cloche serve` starts one")


def control_sockets(config: Config) -> list[Path]:
    """The control sockets of all live servers of this data directory, the newest server's first.

    Raises Unavailable where the user may not read the directory.
    """
    return live_control_sockets(Path(config.data_dir) / "run")


def existing_data_dir(config: Config) -> Path:
    """The data directory, which must exist: a mistyped one would seem empty. Raises NotFound."""
    place = Path(config.data_dir)
    with errors.using_data_dir(place):
        try:
            os.scandir(place).close()
        except FileNotFoundError:
            raise errors.NotFound(f"there is no data directory {place}: name it with --data-dir") from None
    return place


@contextmanager
def connected_client(config: Config) -> Iterator[httpx2.Client | None]:
    """A client of the newest live server; None where no server runs."""
    found = control_sockets(config)
    if not found:
        yield None
        return
    with open_client(found[0]) as client:
        yield client


@contextmanager
def open_client(socket: Path, seconds: float = ANSWER_SECONDS) -> Iterator[httpx2.Client]:
    """A client of the server with that control socket. Requests take paths, such as `/api/v1/sandboxes`."""
    with short_path(socket) as path:
        transport = httpx2.HTTPTransport(uds=path)
        with httpx2.Client(transport=transport, base_url="http://localhost", timeout=seconds) as client:
            yield client


def request_any_server(
    config: Config, method: str, path: str, body: Any = None, *, seconds: float = ANSWER_SECONDS
) -> Any:
    """As `request_json`, at the first live server that knows the object in the path.

    Raises Unavailable where no server runs, and the error of the last one, if none of them has it.
    """
    found = control_sockets(config)
    if not found:
        raise no_server_error(config)
    for socket in found[:-1]:
        try:
            with open_client(socket, seconds) as client:
                return request_json(client, method, path, body)
        except errors.NotFound:
            continue
    with open_client(found[-1], seconds) as client:
        return request_json(client, method, path, body)


@contextmanager
def warn_on_interrupt() -> Iterator[None]:
    """Around a request that the server completes without its client: an interrupt prints a note on that."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("cloche: interrupted; the server completes the request", err=True)
        raise


def apply_to_each(ids: Sequence[str], work: Callable[[str], object], done: str) -> None:
    """Calls `work` for each id and prints it; a failure is printed and does not stop the others.

    Exits with our status if any has failed. A single one's error is raised.
    """
    failed = 0
    for id in ids:
        try:
            with warn_on_interrupt():
                work(id)
            click.echo(f"{done} {id}")
        except errors.ClocheError as error:
            if len(ids) == 1:
                raise
            failed += 1
            click.echo(f"cloche: {id}: {error}", err=True)
    if failed:
        click.get_current_context().exit(EXIT_CLOCHE_FAILED)


@contextmanager
def short_path(socket: Path) -> Iterator[str]:
    """A short temporary path of that socket: the kernel takes 107 characters, a data directory may have more."""
    directory = os.open(socket.parent, os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{socket.name}"
    finally:
        os.close(directory)


def request_json(client: httpx2.Client, method: str, path: str, body: Any = None) -> Any:
    """Sends a request and returns the decoded JSON; None for an empty response.

    Raises Unavailable without a response, and the error that the server reports.
    """
    try:
        response = client.request(method, path, json=body)
    except httpx2.HTTPError as error:
        raise errors.Unavailable(f"the server does not answer on its control socket: {error}") from None
    if not response.is_success:
        raise response_error(response)
    return response.json() if response.content else None


def response_error(response: httpx2.Response) -> errors.ClocheError:
    """The exception for an error response of ours."""
    from cloche.protocol.responses import exception_from_response  # here: it takes a while to import

    return exception_from_response(response.content, response.status_code)
