"""Volumes of new sandboxes: OpenSandbox's named claims and directories of the host are named volumes of the owner's.

No directory of this server's machine is ever mounted: the path of one only names a volume.
"""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import re
from collections.abc import Sequence
from typing import Any

from cloche import errors
from cloche.api.dialect import UnsupportedField
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.engine.sandboxes.volumes import VolumeRegistry, parse_volume_reference
from cloche.model import Struct

LINK_SECONDS = 30.0
LINK_PLACES = ("/tmp/", "/workspace/", "/home/user/")
_MOUNT_POINT = re.compile(r"/mnt/[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OTHER_LETTERS = re.compile(r"[^A-Za-z0-9]+")
_LINK = 'mkdir -p -- "$(dirname -- "$1")" && ln -sT -- "$2" "$1"'


class HostDirectoryBody(Struct):
    path: str


class VolumeClaimBody(Struct):
    claimName: str
    createIfNotExists: bool | None = None
    deleteOnSandboxTermination: bool | None = None


class OpenSandboxVolumeBody(Struct):
    """A volume of a creation. The names are OpenSandbox's."""

    mountPath: str
    name: str = ""
    readOnly: bool | None = None
    subPath: str | None = None
    host: HostDirectoryBody | None = None
    pvc: VolumeClaimBody | None = None
    ossfs: dict[str, Any] | None = None


class RequestedVolume(Struct):
    """A volume of the owner's, and where a sandbox has it: `link` is another path that leads to `mount_path`."""

    name: str
    create: bool
    reference: str  # the name, with the directory in it, and whether it is read only
    mount_path: str
    link: str | None


def volume_from_body(message: OpenSandboxVolumeBody) -> RequestedVolume:
    """Raises InvalidRequest, UnsupportedField."""
    if message.ossfs is not None:
        raise UnsupportedField("volumes.ossfs: this server mounts no object storage; give pvc or host")
    if (message.pvc is None) == (message.host is None):
        raise errors.InvalidRequest("volumes: give each of them either pvc or host")
    if message.pvc is not None and message.pvc.deleteOnSandboxTermination:
        raise UnsupportedField("volumes.pvc.deleteOnSandboxTermination: volumes stay until they are removed")
    path = posixpath.normpath(message.mountPath)
    if not path.startswith("/") or "\0" in path or path.startswith("//"):
        raise errors.InvalidRequest(f"volumes.mountPath: it must be an absolute path, not {message.mountPath[:80]!r}")
    subpath = (message.subPath or "").strip("/")
    if subpath.endswith(":ro"):
        raise errors.InvalidRequest("volumes.subPath: it cannot end in ':ro' here")
    name = message.pvc.claimName if message.pvc else _name_of_path("host", message.host.path if message.host else "")
    fits = _MOUNT_POINT.fullmatch(path) and path != "/mnt/data"
    if not fits and not path.startswith(LINK_PLACES):
        raise _mount_path_error(path)
    return RequestedVolume(
        name=name,
        create=message.pvc is None or message.pvc.createIfNotExists is not False,
        reference=f"{name}{'/' if subpath else ''}{subpath}{':ro' if message.readOnly else ''}",
        mount_path=path if fits else f"/mnt/{_name_of_path('at', path)}",
        link=None if fits else path,
    )


def _name_of_path(kind: str, path: str) -> str:
    """A readable name, different for each path."""
    letters = _OTHER_LETTERS.sub("-", path).strip("-")[-40:].strip("-")
    return f"{kind}-{letters}-{hashlib.sha256(path.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


async def provide_volumes(registry: VolumeRegistry, wanted: Sequence[RequestedVolume], owner: str) -> dict[str, str]:
    """The references by path, for a new sandbox. Volumes that do not exist are made.

    Raises InvalidRequest, VolumeNotFound for a claim that must exist, Unavailable.
    """
    references: dict[str, str] = {}
    for each in wanted:
        if each.mount_path in references:
            raise errors.InvalidRequest(f"volumes: two of them are mounted at {each.link or each.mount_path}")
        parse_volume_reference(each.reference)
        references[each.mount_path] = each.reference
    for each in wanted:
        if each.create:
            await _create_missing_volume(registry, each.name, owner)
    return references


async def _create_missing_volume(registry: VolumeRegistry, name: str, owner: str) -> None:
    try:
        await registry.get(name, owner)
    except errors.VolumeNotFound:
        with contextlib.suppress(errors.VolumeConflict):  # by another request, meanwhile
            await registry.create(name, owner)


async def link_volumes(sandbox: Sandbox, wanted: Sequence[RequestedVolume]) -> None:
    """Makes symlinks for volumes outside of /mnt: mounts are only there. Raises InvalidRequest if one cannot be."""
    for each in wanted:
        if each.link is None:
            continue
        command = ("/bin/sh", "-c", _LINK, "sh", each.link, each.mount_path)
        made = await sandbox.commands.run(command, user="root", timeout_seconds=LINK_SECONDS)
        if made.exit_code:
            raise _mount_path_error(each.link)


def _mount_path_error(path: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"volumes.mountPath: a volume cannot be mounted at {path[:80]!r}; choose /mnt/NAME, or a path that does not "
        "exist below /tmp, /workspace or /home/user"
    )
