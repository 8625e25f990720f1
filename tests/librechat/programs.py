"""What tests send to POST /exec and POST /upload."""

from __future__ import annotations

from typing import Any

import httpx2

Json = dict[str, Any]


def run(client: httpx2.Client, lang: str, code: str, **fields: Any) -> Json:
    """The answer of a program that ran, however it ended."""
    answer = client.post("/exec", json={"lang": lang, "code": code, **fields})
    assert answer.status_code == 200, answer.text
    body: Json = answer.json()
    return body


def upload(client: httpx2.Client, files: dict[str, bytes], *, batch: bool = False, **fields: str) -> list[Json]:
    """References to these files, as a client has them."""
    parts = [("file", (name, content)) for name, content in files.items()]
    answer = client.post("/upload/batch" if batch else "/upload", data=fields, files=parts)
    assert answer.status_code == 200, answer.text
    session = answer.json()["storage_session_id"]
    space = {"kind": fields.get("kind", "user"), "resource_id": fields.get("id", "somebody")}
    version = {"version": int(fields["version"])} if "version" in fields else {}
    return [
        {"storage_session_id": session, "id": each["fileId"], "name": each["filename"], **space, **version}
        for each in answer.json()["files"]
    ]


def reference(file: Json) -> Json:
    """How a client refers to a file of an answer."""
    return {
        "kind": "user",
        "resource_id": file["id"],
        **{key: file[key] for key in ("id", "name", "storage_session_id")},
    }


def names(answer: Json, *, inherited: bool = False) -> list[str]:
    """Of the files that a program made or changed; or of those that are as they were."""
    return sorted(file["name"] for file in answer["files"] if file.get("inherited", False) is inherited)


def content(client: httpx2.Client, file: Json) -> bytes:
    answer = client.get(f"/download/{file['storage_session_id']}/{file['id']}", params={"kind": "user", "id": "x"})
    assert answer.status_code == 200, answer.text
    return answer.content
