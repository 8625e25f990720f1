"""Images in a terminal, where it can show them: the protocols of kitty and of iTerm2."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Draw = Callable[[Mapping[str, Any]], str | None]
"""Makes of a MIME bundle what shows its image in the terminal; None if it has no image that this terminal can show."""

CHUNK_CHARACTERS = 4096  # kitty's limit per escape sequence
_KONSOLE_WITH_KITTY = 220400


def drawing(environ: Mapping[str, str]) -> Draw | None:
    """How the terminal of this environment shows images; None if it is not known to."""
    term = environ.get("TERM", "")
    if environ.get("TMUX") or re.match(r"(tmux|screen)", term):
        return None  # they swallow what they do not know
    if _speaks_kitty(term, environ):
        return kitty
    program = environ.get("TERM_PROGRAM", "")
    if program in ("iTerm.app", "WezTerm") or environ.get("LC_TERMINAL") == "iTerm2":
        return iterm
    return None


def _speaks_kitty(term: str, environ: Mapping[str, str]) -> bool:
    konsole = environ.get("KONSOLE_VERSION", "")
    return (
        term in ("xterm-kitty", "xterm-ghostty")
        or bool(environ.get("KITTY_WINDOW_ID"))
        or (konsole.isdigit() and int(konsole) >= _KONSOLE_WITH_KITTY)
    )


def kitty(bundle: Mapping[str, Any]) -> str | None:
    """PNG only. `q=2`: the terminal must not answer, since nobody reads that."""
    png = bundle.get("image/png")
    if not isinstance(png, bytes):
        return None
    chunks = list(_chunks(base64.b64encode(png).decode()))
    parts = []
    for at, chunk in enumerate(chunks):
        control = "a=T,f=100,q=2," if at == 0 else ""
        parts.append(f"\x1b_G{control}m={int(at + 1 < len(chunks))};{chunk}\x1b\\")
    return "".join(parts) + "\n"


def iterm(bundle: Mapping[str, Any]) -> str | None:
    for mime in ("image/png", "image/jpeg", "image/gif"):
        content = bundle.get(mime)
        if isinstance(content, bytes):
            data = base64.b64encode(content).decode()
            return f"\x1b]1337;File=inline=1;size={len(content)}:{data}\x07\n"
    return None


def _chunks(text: str) -> Iterator[str]:
    for at in range(0, max(len(text), 1), CHUNK_CHARACTERS):
        yield text[at : at + CHUNK_CHARACTERS]
