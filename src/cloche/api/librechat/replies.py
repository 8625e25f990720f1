"""Answers in the shapes of LibreChat's code API, and what goes wrong in them."""

from __future__ import annotations

import secrets
import string
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from cloche import errors

ID_LENGTH = 21
RETRY_SECONDS = 5
_ID_LETTERS = string.ascii_letters + string.digits + "_-"

Json = dict[str, Any]


class Refusal(errors.ClocheError):
    """An answer that is not 200, as LibreChat's clients know it: `error` is a word or a sentence they look for."""

    code = "refused"

    def __init__(
        self, status: int, error: str, message: str = "", headers: dict[str, str] | None = None, **fields: Any
    ):
        super().__init__(message or error)
        self.status = status
        self.body: Json = {"error": error, **({"message": message} if message else {}), **fields}
        self.headers = headers or {}


def too_many_programs(why: str) -> Refusal:
    """503, for what is possible soon."""
    headers = {"retry-after": str(RETRY_SECONDS)}
    return Refusal(503, "too_many_programs", f"{why}; try again later", headers, retry_after_seconds=RETRY_SECONDS)


def new_code_id() -> str:
    """An id of a session, a file or an execution: LibreChat takes no others than 21 URL-safe characters."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(ID_LENGTH))


def is_code_id(id: object) -> bool:
    return isinstance(id, str) and len(id) == ID_LENGTH and all(letter in _ID_LETTERS for letter in id)


def json_reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")


def timestamp(seconds: float) -> str:
    """ISO 8601 to the millisecond, as JavaScript writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
