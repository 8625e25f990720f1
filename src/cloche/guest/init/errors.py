"""Errors of failed requests, as reported to the host: a code as in `cloche.errors`, and a sentence."""

from __future__ import annotations

import errno

_CODES = {
    errno.ENOENT: "file_not_found",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "permission_denied",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EISDIR: "is_a_directory",
    errno.ENOTDIR: "not_a_directory",
    errno.EEXIST: "file_exists",
    errno.ENOTEMPTY: "file_exists",
    errno.ELOOP: "invalid_path",
    errno.ENAMETOOLONG: "invalid_path",
    errno.ESRCH: "process_not_found",
    errno.ECONNREFUSED: "port_not_open",
}


def describe_error(error: Exception) -> dict:
    if isinstance(error, OSError):
        return {"code": _CODES.get(error.errno or 0, "file_error"), "message": error.strerror or str(error)}
    return {"code": getattr(error, "code", "invalid_request"), "message": error.args[0] if error.args else str(error)}
