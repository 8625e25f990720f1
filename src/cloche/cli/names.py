"""Names of owners and ids of keys, as arguments: what cannot be one is said before anybody is asked."""

from __future__ import annotations

import re

import click

from cloche import errors
from cloche.store.keys import check_owner

_KEY_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_:.-]{0,127}")


def owner_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """An argument's callback. Raises BadParameter."""
    if value is not None:
        try:
            check_owner(value)
        except errors.InvalidRequest as error:
            raise click.BadParameter(str(error)) from None
    return value


def key_id(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """An argument's callback. Raises BadParameter."""
    if value is not None and not _KEY_ID.fullmatch(value):
        raise click.BadParameter(f"{value!r} cannot be the id of a key: `cloche key list` shows those that there are")
    return value


def unknown(owner: str) -> errors.NotFound:
    """For an owner who has no key, no quota and nothing that is kept: likely a misspelt one."""
    return errors.NotFound(f"there is no owner {owner!r}: `cloche key list` shows those that there are")
