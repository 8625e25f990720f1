"""What a kernel is told to run, and how."""

from __future__ import annotations

from collections.abc import Sequence

from cloche import errors
from cloche.guest import wire
from cloche.isolation.channel import Header
from cloche.model import Limits, Showing

RUN_LENGTH = 20  # of the random part of an execution's id


def header_of(
    limits: Limits, env: dict[str, str], cwd: str | None, argv: Sequence[str] | None, showing: Showing, has_input: bool
) -> Header:
    """What a kernel is told beside the code. Raises InvalidRequest if that is too long for a frame.

    What is short for a program can be long in a frame: JSON has six characters for each control character.
    """
    header = {
        "env": env,
        "cwd": cwd,
        "input": has_input,
        "display_bytes": limits.output_bytes,
        "argv": None if argv is None else list(argv),
        "show": [name for name in Showing.__struct_fields__ if getattr(showing, name)],
    }
    try:
        wire.encode({"do": "execute", "run": "x" * (RUN_LENGTH + 1), **header})
    except wire.WireError as error:
        raise errors.InvalidRequest(f"{error}: put what is long in the environment or argv into a file") from None
    return header


def encoded(code: str) -> bytes:
    """Code as a kernel gets it. Raises InvalidRequest if it is too long.

    Lone surrogates pass: what Python says to them is the program's affair.
    """
    content = code.encode("utf-8", "surrogatepass")
    if len(content) > wire.MAX_BODY_FROM_HOST:
        raise errors.InvalidRequest(f"code of {len(content)} bytes is more than the {wire.MAX_BODY_FROM_HOST} possible")
    return content
