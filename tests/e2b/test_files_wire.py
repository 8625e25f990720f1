"""envd's values on the wire: pure functions, with what the protocol shows."""

from __future__ import annotations

import msgspec
import pytest

from cloche import errors
from cloche.api.dialect import format_timestamp
from cloche.api.e2b import envd_schema as wire
from cloche.api.e2b.envd import decode_compose_request as composition
from cloche.api.encoding import (
    RangeNotSatisfiable,
    RequestedRange,
    choose_content_encoding,
    format_last_modified,
    inline_content_disposition,
    parse_range_header,
)
from cloche.api.multipart import iterate_form_parts
from cloche.model import FileInfo, SymlinkTarget

FILE = FileInfo(
    path="/home/user/a.txt",
    name="a.txt",
    kind="file",
    size_bytes=5,
    mode=0o644,
    owner="user",
    group="user",
    modified_at=1767225600.123456,
)


def test_a_file_is_told_as_in_the_protocols_own_example():
    assert wire.encode_entry_info(FILE) == {
        "name": "a.txt",
        "type": "FILE_TYPE_FILE",
        "path": "/home/user/a.txt",
        "size": "5",
        "mode": 420,
        "permissions": "-rw-r--r--",
        "owner": "user",
        "group": "user",
        "modifiedTime": "2026-01-01T00:00:00.123456Z",
    }


def link(end: SymlinkTarget) -> FileInfo:
    return msgspec.structs.replace(FILE, kind="symlink", mode=0o777, leads_to=end)


def test_a_link_has_the_type_of_its_end_and_a_broken_one_none():
    told = wire.encode_entry_info(link(SymlinkTarget(path="/tmp", kind="directory", mode=0o1777)))
    assert (told["type"], told["symlinkTarget"], told["mode"]) == ("FILE_TYPE_DIRECTORY", "/tmp", 0o1777)
    assert told["permissions"] == "Lrwxrwxrwx"
    assert "isSymlink" not in told
    broken = wire.encode_entry_info(link(SymlinkTarget(path="/home/user/a.txt", kind=None, mode=0)))
    assert broken["type"] == "FILE_TYPE_UNSPECIFIED"


@pytest.mark.parametrize(
    ("kind", "mode", "text"),
    [
        ("file", 0o644, "-rw-r--r--"),
        ("file", 0o4755, "urwxr-xr-x"),
        ("directory", 0o755, "drwxr-xr-x"),
        ("directory", 0o1777, "dtrwxrwxrwx"),
        ("symlink", 0o777, "Lrwxrwxrwx"),
        ("file", 0, "----------"),
    ],
)
def test_permissions_are_written_as_go_writes_them(kind, mode, text):
    assert wire.format_go_permissions(kind, mode) == text


@pytest.mark.parametrize(
    ("path", "user", "meant"),
    [
        ("a", "user", "/home/user/a"),
        ("", "user", "/home/user"),
        ("~", "root", "/root"),
        ("~/x/../y", "user", "/home/user/y"),
        ("/x/./y/", "user", "/x/y"),
        ("../../..", "user", "/"),
        ("a~b", "root", "/root/a~b"),
    ],
)
def test_paths_are_below_the_users_home_unless_they_are_whole(path, user, meant):
    assert wire.resolve_user_path(path, user) == meant


def test_only_the_metadata_of_e2b_are_told():
    info = msgspec.structs.replace(FILE, attributes={"e2b.author": "me", "mine": "x", "e2bx.a": "y"})
    assert wire.encode_entry_info(info)["metadata"] == {"author": "me"}
    assert wire.encode_write_info(info) == {
        "path": "/home/user/a.txt",
        "name": "a.txt",
        "type": "file",
        "metadata": {"author": "me"},
    }


@pytest.mark.parametrize("headers", [{"x-metadata-": "v"}, {"x-metadata-a": "\x7f"}, {"x-metadata-a": "x" * 256}])
def test_metadata_that_no_file_can_have(headers):
    with pytest.raises(errors.InvalidRequest):
        wire.metadata_from_headers(headers)


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        ("", "identity"),
        ("gzip, deflate", "identity"),
        ("identity;q=0, gzip;q=0.5", "gzip"),
        ("*;q=0, gzip", "gzip"),
        ("*;q=0", None),
        ("identity;q=0", None),
        ("gzip;q=nonsense, identity;q=0", "gzip"),
    ],
)
def test_the_encoding_is_one_that_is_accepted(accepted, chosen):
    assert choose_content_encoding(accepted) == chosen


@pytest.mark.parametrize(
    ("seconds", "time", "header"),
    [
        (0.5, "1970-01-01T00:00:00.500000Z", "Thu, 01 Jan 1970 00:00:00 GMT"),
        (1e12, "9999-12-31T23:59:59.000000Z", "Fri, 31 Dec 9999 23:59:59 GMT"),
        (-1e12, "0001-01-01T00:00:00.000000Z", "Thu, 01 Jan 1970 00:00:00 GMT"),
        (float("inf"), "9999-12-31T23:59:59.000000Z", "Fri, 31 Dec 9999 23:59:59 GMT"),
        (float("nan"), "0001-01-01T00:00:00.000000Z", "Thu, 01 Jan 1970 00:00:00 GMT"),
    ],
)
def test_times_that_no_protocol_can_write_are_the_nearest_that_it_can(seconds, time, header):
    assert (format_timestamp(seconds), format_last_modified(seconds)) == (time, header)


@pytest.mark.parametrize(
    "body", [b"{", b'{"source_paths":["a"],"destination":"b","x":%s}' % (b"[" * 100_000 + b"]" * 100_000)]
)
def test_a_composition_that_is_none_is_refused(body):
    with pytest.raises(errors.InvalidRequest, match="invalid request body"):
        composition(body)


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (b'"deep/er/one.txt"', "deep/er/one.txt"),
        (rb'"C:\x\y"', r"C:\x\y"),
        (rb'"C:\\x\\y"', r"C:\x\y"),  # as httpx sends the same
        (rb'"\\host\y"', r"\host\y"),
        (rb'"a\"b; name=c"', 'a"b; name=c'),
        ('"é\u2028.txt"'.encode(), "é\u2028.txt"),
        (b"plain", "plain"),
        (b'""', ""),
    ],
)
async def test_a_name_of_a_file_in_a_form_is_kept_as_it_is(sent, meant):
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename=' + sent + b"\r\n\r\nx\r\n--b--\r\n"

    async def body():
        yield form

    assert [(part.name, part.filename) async for part in iterate_form_parts(body(), b"b")] == [("file", meant)]


def test_ranges_and_names():
    assert parse_range_header("bytes=0-0", 10) == RequestedRange(0, 1, 10)
    assert parse_range_header("bytes=-20", 10) == RequestedRange(0, 10, 10)
    assert parse_range_header(None, 10) is None
    for behind in ("bytes=10-", "bytes=-0"):
        with pytest.raises(RangeNotSatisfiable):
            parse_range_header(behind, 10)
    assert inline_content_disposition('a "b"\\.txt') == 'inline; filename="a \\"b\\"\\\\.txt"'
    assert inline_content_disposition("a\r\nb") == "inline; filename*=utf-8''a%0D%0Ab"
