"""Files of containers with OpenAI's own client."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest
from openai import OpenAI
from tests.conftest import RunningServer, wait_until


@pytest.fixture
def container(client: OpenAI) -> Iterator[str]:
    made = client.containers.create(name="files")
    yield made.id
    client.containers.delete(made.id)


def run(client: OpenAI, container: str, code: str) -> str:
    answer = client.responses.create(
        model="cloche/echo",
        input=f"```python\n{code}\n```",
        tools=[{"type": "code_interpreter", "container": container}],
        include=["code_interpreter_call.outputs"],
    )
    return "".join(each.logs for each in answer.output[0].outputs if each.type == "logs")


def content(client: OpenAI, container: str, id: str) -> bytes:
    return client.containers.files.content.retrieve(id, container_id=container).read()


def test_an_upload_lies_in_mnt_data_under_its_own_name(client: OpenAI, container: str):
    file = client.containers.files.create(container, file=("data.csv", b"a,b\n1,2\n"))
    assert re.fullmatch(r"cfile_[0-9a-f]{32}", file.id)
    assert (file.path, file.bytes, file.source, file.container_id) == ("/mnt/data/data.csv", 8, "user", container)
    assert run(client, container, "print(open('data.csv').read())").startswith("a,b\n1,2\n")
    assert content(client, container, file.id) == b"a,b\n1,2\n"


def test_a_second_file_of_a_name_gets_another(client: OpenAI, container: str):
    stored = client.files.create(file=("data.csv", b"stored"), purpose="user_data")
    paths = [client.containers.files.create(container, file=("data.csv", b"1")).path for _ in range(2)]
    paths.append(client.containers.files.create(container, file_id=stored.id).path)
    assert paths == ["/mnt/data/data.csv", "/mnt/data/data-2.csv", "/mnt/data/data-3.csv"]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("../../etc/passwd", "/mnt/data/passwd"),
        ("..\\..\\boot.ini", "/mnt/data/boot.ini"),
        (".bashrc", "/mnt/data/bashrc"),
        ("..", "/mnt/data/file"),
        ("a\u202eb.txt", "/mnt/data/ab.txt"),
        ("日本 (1).csv", "/mnt/data/日本 (1).csv"),
        ("ä" * 300 + ".csv", "/mnt/data/" + "ä" * 98 + ".csv"),
    ],
)
def test_names_are_plain(client: OpenAI, container: str, name: str, path: str):
    file = client.containers.files.create(container, file=(name, b"x"))
    assert file.path == path
    assert content(client, container, file.id) == b"x"


def test_a_large_upload_is_streamed(client: OpenAI, container: str):
    large = bytes(range(256)) * 40_000
    file = client.containers.files.create(container, file=("large.bin", large))
    assert file.bytes == len(large)
    assert content(client, container, file.id) == large


def test_the_list_shows_files_made_by_code_and_ids_stay(client: OpenAI, container: str):
    run(
        client, container, "import os; os.mkdir('d'); open('d/x.txt','w').write('1'); os.symlink('/etc/passwd', 'link')"
    )
    first = client.containers.files.list(container).data
    assert [(each.path, each.source) for each in first] == [("/mnt/data/d/x.txt", "assistant")]
    run(client, container, "open('d/x.txt','w').write('22')")
    second = client.containers.files.list(container).data
    assert (second[0].id, second[0].bytes) == (first[0].id, 2)
    assert content(client, container, first[0].id) == b"22"
    run(client, container, "os.remove('d/x.txt')")
    assert client.containers.files.list(container).data == []
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.containers.files.retrieve(first[0].id, container_id=container)


def test_pages(client: OpenAI, container: str):
    made = [client.containers.files.create(container, file=(f"{n}.txt", b"x")).id for n in range(3)]
    assert [each.id for each in client.containers.files.list(container, order="asc", limit=2)] == made
    assert [each.id for each in client.containers.files.list(container, limit=1)] == made[::-1]


def test_a_deleted_file_is_gone_inside_too(client: OpenAI, container: str):
    file = client.containers.files.create(container, file=("a.txt", b"x"))
    client.containers.files.delete(file.id, container_id=container)
    assert run(client, container, "import os; print(os.listdir('.'))") == "[]\n"
    for ask in (
        client.containers.files.retrieve,
        client.containers.files.delete,
        client.containers.files.content.retrieve,
    ):
        with pytest.raises(openai.NotFoundError, match="not found"):
            ask(file.id, container_id=container)


def test_a_link_that_took_the_place_of_a_file_leads_nowhere(client: OpenAI, container: str):
    file = client.containers.files.create(container, file=("a.txt", b"x"))
    run(client, container, "import os; os.remove('a.txt'); os.symlink('/etc/passwd', 'a.txt')")
    with pytest.raises(openai.NotFoundError, match="not found"):
        content(client, container, file.id)


def test_an_unknown_file_id_and_a_body_without_a_file_are_refused(client: OpenAI, container: str):
    with pytest.raises(openai.NotFoundError, match="No such File object: file-x"):
        client.containers.files.create(container, file_id="file-x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.containers.files.create(container)
    assert refused.value.param == "file"


def test_uploads_can_be_read_after_the_containers_end(client: OpenAI, expire: Callable[[str], None]):
    container = client.containers.create(name="ends").id
    file = client.containers.files.create(container, file=("a.txt", b"kept"))
    expire(container)
    assert [each.id for each in client.containers.files.list(container)] == [file.id]
    assert content(client, container, file.id) == b"kept"
    with pytest.raises(openai.BadRequestError, match="Container is expired"):
        client.containers.files.delete(file.id, container_id=container)
    client.containers.delete(container)
    with pytest.raises(openai.NotFoundError):
        content(client, container, file.id)


def test_contents_have_their_type_and_cannot_act(client: OpenAI, container: str, gateway_server: RunningServer):
    file = client.containers.files.create(container, file=('a"b.html', b"<script>"))
    url = f"{gateway_server.url}/v1/containers/{container}/files/{file.id}/content"
    headers = {"authorization": f"Bearer {gateway_server.key}", "accept": "application/binary"}
    answer = httpx2.get(url, headers=headers)
    assert answer.status_code == 200 and answer.content == b"<script>"
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-length"] == "8"
    assert answer.headers["content-security-policy"] == "sandbox"


def test_many_uploads_of_one_name_at_once_get_names_of_their_own(client: OpenAI, container: str):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: client.containers.files.create(container, file=("a.txt", b"x")), range(4)))
    assert {each.path for each in made} == {f"/mnt/data/a{n}.txt" for n in ("", "-2", "-3", "-4")}


def test_names_that_are_not_utf8_or_hold_line_ends_do_no_harm(client: OpenAI, container: str):
    run(client, container, "for n in (b'\\xff', b'a\\nb.txt'): open(b'/mnt/data/' + n, 'wb').write(b'x')")
    (file,) = client.containers.files.list(container)
    answer = client.containers.files.content.with_raw_response.retrieve(file.id, container_id=container)
    assert answer.content == b"x" and answer.headers["content-disposition"] == "inline; filename*=utf-8''a%0Ab.txt"


@pytest.mark.long
def test_a_file_that_does_not_fit_is_refused_and_the_container_lives(client: OpenAI, container: str):
    run(client, container, "f = open('fill', 'wb'); f.write(bytes(1000 << 20)); f.close()")
    with pytest.raises(openai.BadRequestError, match="No space left") as refused:
        client.containers.files.create(container, file=("big", bytes(64 << 20)))
    assert refused.value.code == "no_space"
    assert run(client, container, "import os; print(os.listdir('.'))") == "['fill']\n"


def test_a_file_that_code_removed_is_gone_for_good(client: OpenAI, expire: Callable[[str], None]):
    container = client.containers.create(name="removed").id
    one, two = (client.containers.files.create(container, file=(name, b"x")) for name in ("1.txt", "2.txt"))
    run(client, container, "import os; os.remove('1.txt'); os.remove('2.txt')")
    with contextlib.suppress(openai.NotFoundError):  # who is first: it, or who looks what code has removed
        client.containers.files.delete(one.id, container_id=container)
    assert client.containers.files.list(container).data == []
    for file in (one, two):
        with pytest.raises(openai.NotFoundError):
            client.containers.files.retrieve(file.id, container_id=container)
    expire(container)
    assert client.containers.files.list(container).data == []


def test_an_upload_that_code_changed_is_kept_as_it_is_now(client: OpenAI, expire: Callable[[str], None], bare_dir: str):
    container = client.containers.create(name="changed").id
    stored = client.files.create(file=("stored.txt", b"old"), purpose="user_data")
    files = [
        client.containers.files.create(container, file=("a.txt", b"old")),
        client.containers.files.create(container, file_id=stored.id),
    ]
    run(client, container, "for name in ('a.txt', 'stored.txt'): open(name, 'w').write('new, and longer')")
    blobs = [Path(bare_dir) / "blobs" / file.id for file in files]
    wait_until(lambda: [blob.read_bytes() for blob in blobs] == [b"new, and longer"] * 2)
    expire(container)
    assert [content(client, container, file.id) for file in files] == [b"new, and longer"] * 2
    assert client.files.content(stored.id).read() == b"old"
    client.containers.delete(container)


def test_an_upload_that_code_made_too_large_to_be_kept_has_its_id_still(client: OpenAI, container: str, bare_dir: str):
    file = client.containers.files.create(container, file=("data.bin", b"small"))

    def kept() -> int:
        with contextlib.closing(sqlite3.connect(Path(bare_dir) / "store.sqlite3")) as db:
            return db.execute("SELECT kept FROM container_files WHERE id = ?", (file.id,)).fetchone()[0]

    assert kept() == 1
    run(client, container, "import os\nos.truncate('data.bin', 17 << 20)")
    wait_until(lambda: kept() == 0)
    assert client.containers.files.retrieve(file.id, container_id=container).bytes == 17 << 20
    assert [each.id for each in client.containers.files.list(container)] == [file.id]


def test_files_that_come_and_go_leave_nothing_known(client: OpenAI, container: str, bare_dir: str):
    for number in range(3):
        run(
            client,
            container,
            f"open('{number}.txt', 'w').write('x'); import os; os.path.exists('{number - 1}.txt') "
            f"and os.remove('{number - 1}.txt')",
        )
        assert len(client.containers.files.list(container).data) == 1
    with contextlib.closing(sqlite3.connect(Path(bare_dir) / "store.sqlite3")) as db:
        query = "SELECT COUNT(*) FROM container_files WHERE sandbox = ?"
        assert db.execute(query, (container.removeprefix("cntr_"),)).fetchone() == (1,)


@pytest.mark.parametrize("more", ["cut off", "too many"])
def test_an_upload_that_is_refused_in_the_end_leaves_nothing(
    client: OpenAI, container: str, gateway_server: RunningServer, bare_dir: str, more: str
):
    blobs = Path(bare_dir) / "blobs"
    before = set(blobs.glob("cfile_*"))
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\ncontent\r\n--x'
    field = b'\r\nContent-Disposition: form-data; name="same"\r\n\r\n1\r\n--x'
    headers = {
        "authorization": f"Bearer {gateway_server.key}",
        "content-type": "multipart/form-data; boundary=x",
    }
    body = head + (field * 20 + b"--\r\n" if more == "too many" else field[:20])
    answer = httpx2.post(f"{gateway_server.url}/v1/containers/{container}/files", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert client.containers.files.list(container).data == []
    assert run(client, container, "import os; print(os.listdir('.'))") == "[]\n"
    # other tests use this directory at the same time: theirs are known, as files of other containers
    wait_until(lambda: blobs_besides_others(bare_dir, of=container) <= before)


def blobs_besides_others(bare_dir: str, *, of: str) -> set[Path]:
    """Those that are of this container, or of none."""
    blobs = set((Path(bare_dir) / "blobs").glob("cfile_*"))
    with contextlib.closing(sqlite3.connect(Path(bare_dir) / "store.sqlite3")) as db:
        query = "SELECT id FROM container_files WHERE sandbox != ?"
        others = {id for (id,) in db.execute(query, (of.removeprefix("cntr_"),))}
    return {blob for blob in blobs if blob.name not in others}


def test_a_container_that_was_killed_elsewhere_can_have_its_files_forgotten(
    client: OpenAI, gateway_server: RunningServer, bare_dir: str
):
    container = client.containers.create(name="killed").id
    file = client.containers.files.create(container, file=("a.txt", b"x"))
    url = f"{gateway_server.url}/api/v1/sandboxes/{container.removeprefix('cntr_')}"
    httpx2.delete(url, headers={"authorization": f"Bearer {gateway_server.key}"}).raise_for_status()
    assert (Path(bare_dir) / "blobs" / file.id).exists()
    with pytest.raises(openai.NotFoundError):
        client.containers.delete(container)
    assert not (Path(bare_dir) / "blobs" / file.id).exists()
