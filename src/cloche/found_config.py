"""What a `./cloche.toml` that nobody named may not decide: it may have come with somebody's repository."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloche import errors

LOCAL_FILE = "cloche.toml"
FOUND_FILE = f"file ./{LOCAL_FILE}"  # the origin of what comes from such a file

# What says where sandboxes may go. Everything else of these tables denies, or limits.
_WIDENING = frozenset({"network.allow", "network.default", "packages.enabled", "packages.allow"})
_WAYS_IN = frozenset({"network.internal", "network.hosts", "packages.pypi", "packages.npm"})


def variable_of(key: str) -> str:
    """The environment variable of a key."""
    return "CLOCHE_" + key.upper().replace(".", "_")


def check_harmless(file: Path, key: str, value: Any) -> None:
    """It must not say what is mounted into sandboxes, nor take them away, nor send them to servers of its choice."""
    if (key, value) == ("backend", "plain-unsafe"):
        what, flag = "turn isolation off", "--backend, CLOCHE_BACKEND"
    elif key == "data_dir":
        what, flag = "choose data_dir, from which templates are taken", "--data-dir, CLOCHE_DATA_DIR"
    elif key in _WAYS_IN:
        what, flag = f"set {key}, which says where names, packages or private addresses lead", variable_of(key)
    elif key.startswith("librechat.jwt."):
        what, flag = f"set {key}, which says whose tokens this server accepts", variable_of(key)
    else:
        return
    raise errors.InvalidConfig(
        f"a {file} that merely lies in this directory cannot {what}: ask for it with {flag}, or a file that you name "
        "with --config"
    )


def check_ownership(file: Path) -> None:
    """A file of somebody else's that merely lies in the current directory (say /tmp) must not steer us."""
    if file.stat().st_uid not in (0, os.geteuid()):
        raise errors.InvalidConfig(f"./{file} belongs to another user: remove it, or name it with --config to use it")


def refuse_upstreams(origins: Mapping[str, str]) -> None:
    """For what sends prompts by itself. Raises InvalidConfig if upstreams come from such a file.

    It could send a key of the environment and all that is said to its author.
    """
    if origins.get("upstream") == FOUND_FILE:
        raise errors.InvalidConfig(
            f"a {LOCAL_FILE} that merely lies in this directory cannot say where models are, since your messages and a "
            f"key of yours would go there: read it, and name it with `cloche --config ./{LOCAL_FILE} chat` to use it"
        )


def refuse_networks(origins: Mapping[str, str]) -> None:
    """For whoever is their own operator. Raises InvalidConfig if such a file says what sandboxes may reach.

    It would let out what is meant to stay in. What only denies or limits is taken.
    """
    found = [key for key, origin in origins.items() if origin == FOUND_FILE and key in _WIDENING | _WAYS_IN]
    if found:
        raise errors.InvalidConfig(
            f"a {LOCAL_FILE} that merely lies in this directory cannot set {found[0]} here, since it would say what "
            f"your sandboxes may reach: read it, and name it with --config ./{LOCAL_FILE} or CLOCHE_CONFIG to use it"
        )
