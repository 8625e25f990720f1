"""Each try, sent as it is with the victim's ids and with ids that never existed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

from tests.tenants.belongings import Belongings
from tests.tenants.tries import Try
from tests.tenants.wire import Answer

_PLACE = re.compile(r"<(own |their )?(\w+)>")
_FRESH = re.compile(
    r"\b(chatcmpl-|resp_|msg_|rs_|ci_|cntr_|conv_|call_)[0-9a-zA-Z]{10,}|\"created(_at)?\":\d+(\.\d+)?|expires=\d+&token=\w+"
)
_CODE_ID = re.compile(r"\"(session_id|storage_session_id|id|fileId)\":\"[A-Za-z0-9_-]{21}\"")

_MEASURED = re.compile(
    r"\"(wall_time|cpu_time|memory|executionTimeInMilliseconds)\":\d+|rt_[0-9a-f]{40}"
    r"|\"id\":\"[0-9a-f]{32}\"|\"lastModified(Time|At)\":\"[^\"]*\""
)
_DRAWN = re.compile(r"<svg.*?</svg>|<meter.*?</meter>|\d+(\.\d+)?( ?(ms|[dhms]|%|[KMG]?i?B)\b)?", re.DOTALL)


class Sent(NamedTuple):
    """A request without any places left in it, and what stood for an id in it."""

    method: str
    path: str
    body: Any
    headers: dict[str, str]
    ids: dict[str, str]  # the placeholder of each


class Pair(NamedTuple):
    """The same request for something of the victim's, and for what never was."""

    attempt: Try
    own: int  # so many of its ids, from the first on, are the attacker's own
    foreign: Sent
    absent: Sent


def pairs(attempt: Try, victim: Belongings, attacker: Belongings) -> Iterator[Pair]:
    """With all ids of somebody else's, and with those that lead to the last ones the attacker's own."""
    places = list(dict.fromkeys(name for which, name in _places(attempt) if not which))
    for own in range(max(len(places), 1)):
        mine = {name: attacker.ids[name] for name in places[:own]}
        theirs = {name: victim.ids[name] for name in places[own:]}
        nobodys = {name: ghost(id) for name, id in theirs.items()}
        made = [_sent(attempt, {**mine, **ids}, victim, attacker, ids) for ids in (theirs, nobodys)]
        yield Pair(attempt, own, *made)


def for_owner(attempt: Try, owner: Belongings) -> Sent:
    """With the owner's own ids."""
    return _sent(attempt, owner.ids, owner, owner, {})


def ghost(id: str) -> str:
    """An id of the same shape that nobody ever had."""
    letters = list(id)
    changed = 0
    for at in range(len(letters) - 1, 0, -1):
        if changed == 8:
            break
        for among in ("0123456789", "abcdef", "ghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"):
            if letters[at] in among:
                letters[at] = among[(among.index(letters[at]) + len(among) // 2) % len(among)]
                changed += 1
                break
    return "".join(letters)


def seen(answer: Answer, sent: Sent) -> tuple[int, tuple[tuple[str, str], ...], str]:
    """An answer as it would be for any id."""
    text, headers = answer.text, json.dumps(answer.headers)
    for id, name in sorted(sent.ids.items(), key=lambda each: -len(each[0])):
        for written in (id, id.removeprefix("cntr_")):
            text, headers = text.replace(written, name), headers.replace(written, name)
    same = _MEASURED.sub("", _CODE_ID.sub("", _FRESH.sub("", text)))
    if "text/html" in headers:  # a page says how long things have been there, and what they use
        same = _DRAWN.sub("", same)
    kept = [tuple(each) for each in json.loads(headers) if each[0] != "content-length" or same == text]
    return answer.status, tuple(kept), same


def _places(attempt: Try) -> list[tuple[str, str]]:
    written = [attempt.path, *(value for _, value in attempt.headers)]
    if attempt.body is not None and not isinstance(attempt.body, bytes):
        written.append(json.dumps(attempt.body))
    return [(which, name) for each in written for which, name in _PLACE.findall(each)]


def _sent(attempt: Try, ids: dict[str, str], victim: Belongings, attacker: Belongings, told: dict[str, str]) -> Sent:
    def id_of(match: re.Match[str]) -> str:
        which, name = match.groups()
        if which:
            return (attacker if which == "own " else victim).ids[name]
        return ids[name]

    path = _PLACE.sub(lambda match: _quoted(match[2], id_of(match)), attempt.path)
    body = attempt.body
    if body is not None and not isinstance(body, bytes):
        body = json.loads(_PLACE.sub(id_of, json.dumps(body)))
    headers = {name: _PLACE.sub(id_of, value) for name, value in attempt.headers}
    return Sent(attempt.method, path, body, headers, {id: f"<{name}>" for name, id in told.items()})


def _quoted(name: str, id: str) -> str:
    return id if name == "upload_query" else quote(id, safe="")
