"""What E2B's clients say of volumes, and what they are told. Pure; raises InvalidRequest and InvalidPath."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from cloche import errors
from cloche.api.e2b.control_wire import decode, whole_number
from cloche.api.e2b.replies import timestamp
from cloche.engine.sandboxes.volumes import PLACE
from cloche.model import FileInfo, Struct, check_mode
from cloche.store.volumes import VolumeRecord

MAX_ID = 4094  # of a user or group: so many a sandbox has
MAX_DEPTH = 64
_KINDS = {"other": "unknown"}
_IDS = {"root": 0, "user": 1000, "nobody": 65534, "nogroup": 65534}

Json = dict[str, Any]


class NewVolume(Struct):
    """The body of a creation."""

    name: str


class Metadata(Struct):
    """The body of a change; from a query, too."""

    uid: int | None = None
    gid: int | None = None
    mode: int | None = None

    @property
    def asks(self) -> bool:
        return (self.uid, self.gid, self.mode) != (None, None, None)


def wanted_name(body: bytes) -> str:
    return decode(body, NewVolume).name


def listed(volume: VolumeRecord) -> Json:
    return {"volumeID": volume.id, "name": volume.name}


def metadata(body: bytes) -> Metadata:
    return _checked(decode(body, Metadata))


def metadata_of(query: Mapping[str, str]) -> Metadata:
    """What a query asks for what it makes."""
    most = {"uid": MAX_ID, "gid": MAX_ID, "mode": 0o7777}
    asked = {name: whole_number(name, query.get(name), 0, number) for name, number in most.items()}
    return _checked(Metadata(**asked))


def _checked(asked: Metadata) -> Metadata:
    check_mode(asked.mode)
    for name, value in (("uid", asked.uid), ("gid", asked.gid)):
        if value is not None and not 0 <= value <= MAX_ID:
            raise errors.InvalidRequest(f"{name}: it must be a whole number from 0 to {MAX_ID}, not {value}")
    return asked


def depth_of(query: Mapping[str, str]) -> int:
    return whole_number("depth", query.get("depth"), 1, MAX_DEPTH) or 1


def place_of(query: Mapping[str, str]) -> str:
    """Where the vault has it. The root of a volume is `/`, and nothing lies above that."""
    path = query.get("path", "")
    if not path:
        raise errors.InvalidRequest("path: it is missing; / is the volume itself")
    inside = posixpath.normpath("/" + path).lstrip("/")
    return f"{PLACE}/{inside}" if inside else PLACE


def stat(info: FileInfo) -> Json:
    """Of the times of a file, only when it was changed is known here."""
    path = info.path.removeprefix(PLACE) or "/"
    changed = timestamp(info.modified_at)
    return {
        "name": posixpath.basename(path) or "/",
        "type": _KINDS.get(info.kind, info.kind),
        "path": path,
        "size": info.size_bytes,
        "mode": info.mode & 0o7777,
        "uid": _id(info.owner),
        "gid": _id(info.group),
        "atime": changed,
        "mtime": changed,
        "ctime": changed,
        **({} if info.target is None else {"target": info.target}),
    }


def _id(name: str) -> int:
    return int(name) if name.isascii() and name.isdigit() and len(name) < 10 else _IDS.get(name, 65534)


def stats(found: Sequence[FileInfo]) -> list[Json]:
    return [stat(each) for each in found]


def in_words(error: errors.ClocheError) -> str:
    """Where the vault has a volume is nobody's business."""
    return str(error).replace(f"{PLACE}/", "/").replace(PLACE, "/")
