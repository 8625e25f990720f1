"""How files are said: to clients that upload them, list them, and ask whether they are still there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from cloche.api.encoding import last_modified
from cloche.api.librechat.names import ending_of
from cloche.api.librechat.replies import Json, timestamp
from cloche.api.librechat.uploads import Failed, Upload
from cloche.store.librechat import CodeFile


def sessions_body(session: str) -> Json:
    """The storage session as each generation of clients calls it."""
    return {"storage_session_id": session, "session_id": session}


def upload_body(upload: Upload, made: list[CodeFile]) -> Json:
    return {"message": "success", **sessions_body(upload.session), "files": [_uploaded(file) for file in made]}


def batch_body(upload: Upload, made: list[CodeFile], max_files: int) -> Json:
    """What became of each file. Of failures beyond those that are listed, the number is told."""
    files = [{"status": "success", **_uploaded(file)} for file in made] + [_failed(each) for each in upload.failed]
    outcome = "success" if not upload.failures else "partial_success" if made else "error"
    body: Json = {"message": outcome, **sessions_body(upload.session), "files": files}
    body |= {"succeeded": len(made), "failed": upload.failures}
    if upload.too_many:
        body |= {"filesLimitReached": True, "maxFiles": max_files}
    if not made:
        body["error"] = upload.failed[0].refusal.body["error"]
    return body


def _uploaded(file: CodeFile) -> Json:
    return {"filename": file.name, "fileId": file.id, **sessions_body(file.session)}


def _failed(failed: Failed) -> Json:
    said = failed.refusal.body
    return {"status": "error", "filename": failed.name, "error": ": ".join(filter(None, map(said.get, _SAID)))}


_SAID = ("error", "message")


def object_name(file: CodeFile) -> str:
    """Old clients read the id of a file from this."""
    return f"{file.session}/{file.id}{ending_of(file.name)}"


def metadata_body(file: CodeFile) -> Json:
    return {
        **_summary(file),
        "id": file.id,
        **sessions_body(file.session),
        "originalFilename": file.name,
        "contentType": file.content_type,
        "readOnly": file.read_only,
    }


def _summary(file: CodeFile) -> Json:
    # Clients upload a file again once this is 23 hours old: it says since when the file has been unused.
    return {
        "name": object_name(file),
        "size": file.bytes,
        "lastModified": timestamp(file.used_at),
        "etag": file.sha256[:32],
    }


def _full(file: CodeFile) -> Json:
    details = {
        "content-type": file.content_type,
        "original-filename": file.name,
        "original-filename-encoded": "none",
    }
    return {**metadata_body(file), "metadata": details, "versionId": None}


def _normalized(file: CodeFile) -> Json:
    return {
        "id": file.id,
        "name": file.name,
        **sessions_body(file.session),
        "size": file.bytes,
        "contentType": file.content_type,
        "lastModified": timestamp(file.used_at),
        **({"readOnly": True} if file.read_only else {}),
    }


LISTED: Mapping[str, Callable[[CodeFile], Any]] = {
    "simple": object_name,
    "summary": lambda file: {**_summary(file), **sessions_body(file.session)},
    "full": _full,
    "normalized": _normalized,
}
"""How each file is listed, by the `detail` that a client asks for."""


def download_headers(file: CodeFile) -> dict[str, str]:
    return {
        "content-length": str(file.bytes),
        "content-type": file.content_type,
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.name, safe='')}",
        "etag": f'"{file.sha256[:32]}"',
        "last-modified": last_modified(file.created_at),
        # A file is a stranger's: no page of it may act in the name of the server that it comes from.
        "content-security-policy": "sandbox",
        "x-content-type-options": "nosniff",
    }
