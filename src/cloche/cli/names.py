"""Validation of owner names and key ids in command lines, before any request is sent."""

from __future__ import annotations

import re

import click

from cloche import errors
from cloche.store.keys import check_owner_name

_KEY_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_:.-]{0,127}")


def parse_owner_option(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """An argument's callback. Raises BadParameter."""
    if value is not None:
        try:
            check_owner_name(value)
        except errors.InvalidRequest as error:
            raise click.BadParameter(str(error)) from None
    return value


def parse_key_id_option(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """An argument's callback. Raises BadParameter."""
    if value is not None and not _KEY_ID.fullmatch(value):
        raise click.BadParameter(f"{value!r} cannot be the id of a key: `cloche key list` shows the keys")
    return value


def unknown_owner_error(owner: str) -> errors.NotFound:
    """The error for an owner without a key, a quota or stored data: likely a misspelt one."""
    return errors.NotFound(f"there is no owner {owner!r}: `cloche key list` shows the owners")
