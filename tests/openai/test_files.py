"""`/v1/files` with OpenAI's own client."""

from __future__ import annotations

import re

import httpx2
import openai
import pytest
from openai import OpenAI
from tests.conftest import RunningServer

from cloche.store.files import new_file_id


def test_a_file_comes_back_as_it_was_sent(client: OpenAI):
    content = bytes(range(256)) * 20_000  # more than one chunk
    file = client.files.create(file=("näme.bin", content), purpose="user_data")
    assert re.fullmatch(r"file-[A-Za-z0-9]{22}", file.id)
    assert (file.filename, file.bytes, file.purpose, file.status) == (
        "näme.bin",
        len(content),
        "user_data",
        "processed",
    )
    assert client.files.retrieve(file.id).filename == "näme.bin"
    assert client.files.content(file.id).read() == content


def test_a_deleted_file_is_gone(client: OpenAI):
    file = client.files.create(file=b"x", purpose="assistants")
    assert client.files.delete(file.id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as refused:
            ask(file.id)
        assert refused.value.message.endswith(f"No such File object: {file.id}")


def test_files_are_invisible_to_other_owners(client: OpenAI, stranger: OpenAI):
    file = client.files.create(file=b"secret", purpose="user_data")
    assert file.id not in [each.id for each in stranger.files.list()]
    for ask in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(file.id)
    assert client.files.content(file.id).read() == b"secret"


def test_lists_go_by_age_and_purpose_and_in_pages(stranger: OpenAI):
    made = [stranger.files.create(file=b"x", purpose="batch").id for _ in range(3)]
    stranger.files.create(file=b"x", purpose="vision")
    assert [each.id for each in stranger.files.list(purpose="batch", order="asc", limit=2)] == made
    assert [each.id for each in stranger.files.list(purpose="batch").data] == made[::-1]
    page = stranger.files.list(purpose="batch", limit=2)
    assert page.has_more and len(page.data) == 2


def test_a_list_can_be_emptied_page_by_page(stranger: OpenAI):
    for _ in range(3):
        stranger.files.create(file=b"x", purpose="fine-tune")
    for file in stranger.files.list(purpose="fine-tune", limit=1):
        stranger.files.delete(file.id)
    assert stranger.files.list(purpose="fine-tune").data == []


def test_a_file_can_be_given_a_time_to_live(client: OpenAI):
    file = client.files.create(file=b"x", purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"purpose": "nothing"}, "purpose", "invalid_value"),
        (
            {"expires_after": {"anchor": "created_at", "seconds": 3599}},
            "expires_after[seconds]",
            "integer_below_min_value",
        ),
        ({"expires_after": {"anchor": "now", "seconds": 3600}}, "expires_after[anchor]", "invalid_value"),
    ],
)
def test_bad_fields_are_named(client: OpenAI, given: dict, param: str, code: str):
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(**{"file": b"x", "purpose": "user_data", **given})
    assert (refused.value.param, refused.value.code) == (param, code)


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ({"limit": 10_001}, "limit", "integer_above_max_value"),
        ({"limit": 0}, "limit", "integer_below_min_value"),
        ({"order": "up"}, "order", "invalid_value"),
    ],
)
def test_bad_pages_are_refused(client: OpenAI, query: dict, param: str, code: str):
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.list(**query)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_a_form_without_file_or_purpose_or_with_two_files_is_refused(gateway_server: RunningServer):
    def post(**form):
        headers = {"authorization": f"Bearer {gateway_server.key}"}
        answer = httpx2.post(f"{gateway_server.url}/v1/files", headers=headers, **form)
        assert answer.status_code == 400
        return answer.json()["error"]

    assert post(files={"file": b"x"})["param"] == "purpose"
    assert post(data={"purpose": "batch"}, files={"other": ("x", b"x")})["param"] == "file"
    assert post(data={"purpose": "batch"}, files=[("file", b"x"), ("file", b"y")])["param"] == "file"
    assert "multipart/form-data" in post(json={"purpose": "batch"})["message"]


def test_names_cannot_forge_headers(client: OpenAI):
    file = client.files.create(file=('a"; x=\r\nSet-Cookie: b\r\n.html', b"<script>"), purpose="user_data")
    answer = client.files.with_raw_response.content(file.id)
    assert "set-cookie" not in answer.headers
    assert answer.headers["content-security-policy"] == "sandbox"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_ids_sort_by_age():
    ids = [new_file_id() for _ in range(3)]
    assert len({len(each) for each in ids}) == 1 and ids[0][:13] <= ids[1][:13] <= ids[2][:13]
