"""The errors of Cloche itself: it could not fulfil a request.

A program that fails inside a sandbox is never one of these: that is data in the event stream.

    ClocheError                     code
    ├── InvalidRequest              invalid_request       an invalid request
    │   ├── InvalidPath             invalid_path          a path that cannot name anything (NUL, empty, relative)
    │   ├── InvalidConfig           invalid_config        a configuration file or variable with a bad value
    │   ├── NotCopyable             not_copyable          a program that a fork would not copy whole
    │   └── TooLarge                too_large             a body, file or message over its limit
    ├── Unauthenticated             unauthenticated       no key, or one that does not exist
    ├── Forbidden                   forbidden             a key without the right, or a request from a web page
    ├── NotFound                    not_found             it is not there, and may never have been
    │   ├── TemplateNotFound        template_not_found
    │   ├── SnapshotNotFound        snapshot_not_found
    │   ├── VolumeNotFound          volume_not_found
    │   ├── SandboxNotFound         sandbox_not_found     never existed (or belongs to another owner)
    │   ├── ContextNotFound         context_not_found
    │   ├── CheckpointNotFound      checkpoint_not_found  never existed, was forgotten, or has ended
    │   ├── ProcessNotFound         process_not_found
    │   ├── RunNotFound             run_not_found         never existed, or is not kept any more
    │   ├── PortNotOpen             port_not_open         nothing listens there
    │   ├── ModelNotFound           model_not_found       no upstream has such a model
    │   └── FileNotFound            file_not_found
    ├── Gone                        gone                  it was there; the message says when and why it ended
    │   ├── SandboxExpired          sandbox_expired       its deadline passed
    │   ├── SandboxKilled           sandbox_killed        it was killed or closed
    │   └── SandboxLost             sandbox_lost          its host process died or its cell was destroyed
    ├── SandboxPaused               sandbox_paused        it is paused; it can be resumed
    ├── VolumeConflict              volume_conflict       a volume of that name exists, or it is in use
    ├── FileError                   file_error            the sandbox's file system said no
    │   ├── FileExists              file_exists
    │   ├── PermissionDenied        permission_denied
    │   ├── IsADirectory            is_a_directory
    │   ├── NotADirectory           not_a_directory
    │   └── NoSpace                 no_space              the sandbox's writable space is full
    ├── TemplateBuildFailed         template_build_failed
    ├── Unavailable                 unavailable           this host cannot do it now
    │   ├── IsolationUnavailable    isolation_unavailable a requirement is missing; `cloche doctor` explains
    │   ├── NurseryFailed           nursery_failed        the template's nursery could not start
    │   ├── Busy                    busy                  as much runs as this host can have; try again soon
    │   └── ShuttingDown            shutting_down
    ├── QuotaExceeded               quota_exceeded        an owner or a key has used what it may
    ├── UpstreamFailed              upstream_failed       a model's server refused, failed or broke off
    ├── ProtocolViolation           protocol_violation    a guest sent something that no honest guest sends
    └── UsedAfterFork               used_after_fork       a handle was used in a forked child of its process
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager


class ClocheError(Exception):
    """Base of all errors of ours. `code` is stable; `str(error)` names the problem and the remedy."""

    code = "error"
    retry_after_seconds: float | None = None  # when to ask again, where that is known


class InvalidRequest(ClocheError, ValueError):
    code = "invalid_request"


class InvalidPath(InvalidRequest):
    code = "invalid_path"


class InvalidConfig(InvalidRequest):
    code = "invalid_config"


class NotCopyable(InvalidRequest):
    code = "not_copyable"


class TooLarge(InvalidRequest):
    code = "too_large"


class Unauthenticated(ClocheError):
    code = "unauthenticated"


class Forbidden(ClocheError):
    code = "forbidden"


class NotFound(ClocheError, LookupError):
    code = "not_found"

    def __str__(self) -> str:
        return Exception.__str__(self)  # LookupError subclasses would quote the message


class TemplateNotFound(NotFound):
    code = "template_not_found"


class SnapshotNotFound(NotFound):
    code = "snapshot_not_found"


class VolumeNotFound(NotFound):
    code = "volume_not_found"


class SandboxNotFound(NotFound):
    code = "sandbox_not_found"


class ContextNotFound(NotFound):
    code = "context_not_found"


class CheckpointNotFound(NotFound):
    code = "checkpoint_not_found"


class ProcessNotFound(NotFound):
    code = "process_not_found"


class RunNotFound(NotFound):
    code = "run_not_found"


class PortNotOpen(NotFound):
    code = "port_not_open"


class ModelNotFound(NotFound):
    code = "model_not_found"


class FileNotFound(NotFound, FileNotFoundError):
    code = "file_not_found"


class Gone(ClocheError):
    code = "gone"


class SandboxExpired(Gone):
    code = "sandbox_expired"


class SandboxKilled(Gone):
    code = "sandbox_killed"


class SandboxLost(Gone):
    code = "sandbox_lost"


class SandboxPaused(ClocheError):
    code = "sandbox_paused"


class VolumeConflict(ClocheError):
    code = "volume_conflict"


class FileError(ClocheError, OSError):
    code = "file_error"

    def __str__(self) -> str:
        return Exception.__str__(self)


class FileExists(FileError, FileExistsError):
    code = "file_exists"


class PermissionDenied(FileError, PermissionError):
    code = "permission_denied"


class IsADirectory(FileError, IsADirectoryError):
    code = "is_a_directory"


class NotADirectory(FileError, NotADirectoryError):
    code = "not_a_directory"


class NoSpace(FileError):
    code = "no_space"


class TemplateBuildFailed(ClocheError):
    code = "template_build_failed"


class Unavailable(ClocheError):
    code = "unavailable"


class IsolationUnavailable(Unavailable):
    code = "isolation_unavailable"


class NurseryFailed(Unavailable):
    code = "nursery_failed"
    retry_after_seconds = 2.0  # another is started for the next request


class Busy(Unavailable):
    """`retry_after_seconds`: when there may be room."""

    code = "busy"

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ShuttingDown(Unavailable):
    code = "shutting_down"


class QuotaExceeded(ClocheError):
    """`retry_after_seconds`: when there will be some again; None where something has to be removed first."""

    code = "quota_exceeded"

    def __init__(self, message: str, *, retry_after_seconds: float | None = None):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class UpstreamFailed(ClocheError):
    """`status` is the upstream's HTTP status, or its equivalent; `kind`, `reason` and `param` are its own."""

    code = "upstream_failed"

    def __init__(
        self,
        message: str,
        *,
        status: int = 502,
        kind: str = "server_error",
        reason: str | None = None,
        param: str | None = None,
        retry_after: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.reason = reason
        self.param = param
        self.retry_after = retry_after


class ProtocolViolation(ClocheError):
    code = "protocol_violation"


class UsedAfterFork(ClocheError, RuntimeError):
    code = "used_after_fork"


_FULL = (errno.ENOSPC, errno.EDQUOT)
_DATA_DIR_ADVICE = {
    **dict.fromkeys(_FULL, "make room there (`cloche gc` removes unneeded data)"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "do this as the user that owns it"),
}


def explain_data_dir_error(data_dir: str | os.PathLike[str], error: OSError) -> Unavailable | None:
    """The error for a data directory that cannot be made, read or written; None where `error` is about another file."""
    place, path = os.path.abspath(data_dir), error.filename
    if not isinstance(path, str):
        if error.errno not in (*_FULL, errno.EROFS, errno.EIO):
            return None
        path = place
    elif os.path.commonpath([place, os.path.abspath(path)]) != place:
        return None
    reason = (error.strerror or str(error)) + ("" if path == place else f" ({path})")
    advice = _DATA_DIR_ADVICE.get(error.errno or 0)
    remedy = f"{advice}, or name another" if advice else "name another"
    remedy += " with --data-dir or CLOCHE_DATA_DIR"
    return Unavailable(f"the data directory {place} cannot be used: {reason}; {remedy}")


@contextmanager
def using_data_dir(data_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Around work there: raises Unavailable for an OSError that is about the data directory."""
    try:
        yield
    except ClocheError:  # some are OSErrors, too
        raise
    except OSError as error:
        raise explain_data_dir_error(data_dir, error) or error from None
