"""Whether the keys for LibreChat's tokens that the configuration names can be used: asked before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from cloche import errors
from cloche.config import Config, with_origin
from cloche.isolation.base import Check


def ids(config: Config) -> list[str]:
    """Of the keys; none if no tokens are accepted. Raises InvalidConfig that names the setting and its origin."""
    if not config.librechat.jwt.enabled:
        return []
    from cloche.api.librechat.jwt import Keys  # here, since `cloche doctor` must not need what a server does

    try:
        return Keys(config.librechat.jwt).ids
    except errors.InvalidConfig as error:
        raise errors.InvalidConfig(with_origin(str(error), config.origins)) from None


def checks(config: Config) -> Iterator[Check]:
    """For `cloche doctor`."""
    name = "LibreChat's tokens"
    try:
        found = ids(config)
    except errors.InvalidConfig as error:
        yield Check(name=name, state="missing", detail=str(error), advice="repair it: `cloche serve` does not start")
        return
    if found:
        detail = f"checked with {', '.join(found[:5])}{' and more' if len(found) > 5 else ''}"
        yield Check(name=name, state="enforced", detail=detail)
