"""Validation of the configured keys for LibreChat's tokens, before anything starts.

A module of its own, since `cloche doctor` must not load a server.
"""

from __future__ import annotations

from collections.abc import Iterator

from cloche import errors
from cloche.config import Config, describe_with_origin
from cloche.isolation.base import HostCheck


def load_token_key_ids(config: Config) -> list[str]:
    """The ids of the keys; none if no tokens are accepted.

    Raises InvalidConfig that names the setting and its origin.
    """
    if not config.librechat.jwt.enabled:
        return []
    from cloche.api.librechat.jwt import JwtKeys  # here: `cloche doctor` must not require a server's packages

    try:
        return JwtKeys(config.librechat.jwt).ids
    except errors.InvalidConfig as error:
        raise errors.InvalidConfig(describe_with_origin(str(error), config.origins)) from None


def token_key_checks(config: Config) -> Iterator[HostCheck]:
    """The checks for `cloche doctor`."""
    name = "LibreChat's tokens"
    try:
        found = load_token_key_ids(config)
    except errors.InvalidConfig as error:
        yield HostCheck(
            name=name, state="missing", detail=str(error), advice="repair it: `cloche serve` does not start"
        )
        return
    if found:
        detail = f"checked with {', '.join(found[:5])}{' and more' if len(found) > 5 else ''}"
        yield HostCheck(name=name, state="enforced", detail=detail)
