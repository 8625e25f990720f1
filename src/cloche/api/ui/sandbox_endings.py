"""Why a sandbox ended, for people: what happened, what it means, and what to do about it."""

from __future__ import annotations

from typing import NamedTuple

from cloche.engine.sandboxes.endings import KILLED_BY_OWNER
from cloche.store.base import HOST_DIED, SHUT_DOWN, SandboxRecord

_INIT_DIED = "its init died"


class Ending(NamedTuple):
    headline: str
    detail: str
    advice: str = ""


_EXPIRED = Ending(
    "Its deadline passed",
    "It lived for as long as it was given.",
    "Renew it before its deadline, or make it with on_timeout “pause”: then it is paused and keeps its files.",
)
_SHUT_DOWN = Ending(
    "The server stopped",
    "The server was shut down or restarted while it ran, and ended it.",
    "Pause a sandbox before that: one that is paused can be resumed by the next server.",
)
_HOST_DIED = Ending(
    "The server died",
    "The server's process was killed or crashed, and all that ran in it ended with it.",
    "The server's log, or the system's (out of memory?), says why.",
)
_BROKEN = Ending(
    "Its first process died",
    "The process that all others in it descend from was killed or broke: by a program in it, or for want of memory.",
    "Where that happens again, give it more memory, or look at what it runs.",
)
_BY_OWNER = Ending("Killed by its owner", "Whoever it belongs to ended it, by a request of theirs.")


def why(record: SandboxRecord) -> Ending:
    """Of one that has ended."""
    reason = record.end_reason or HOST_DIED
    if record.state == "expired":
        return _EXPIRED
    if reason == SHUT_DOWN:
        return _SHUT_DOWN
    if record.state == "killed":
        return _BY_OWNER if reason == KILLED_BY_OWNER else Ending(_sentence(reason), "It was ended on purpose.")
    if reason == HOST_DIED:
        return _HOST_DIED
    return _lost(reason)


def _lost(reason: str) -> Ending:
    if reason.startswith(_INIT_DIED):
        return _BROKEN._replace(detail=f"{_BROKEN.detail} What was seen: {reason}.")
    return Ending("It broke", f"{_sentence(reason)}.", "The server's log has more.")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
