"""The operations on a workspace's files. The host sends this text into the sandbox, where it runs as `user`.

Files are hostile, so that the host parses none of them. The program reads one JSON object, the operation's name and
arguments, and writes a status, a line break, and the reply as JSON. What a parser raises ends it. All paths are
absolute. Python 3.10 and the standard library; documents are read by packages of the template, where it has them.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import heapq
import importlib
import json
import mimetypes
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

MAX_WALKED = 200_000  # entries that one search looks at
MAX_SEARCHED_BYTES = 8 << 20  # of a file whose content is searched
MAX_LISTED = 20_000
MAX_LINE = 2000  # letters of a line that a search shows
MAX_TEXT = 12 << 20  # letters of a reply
MAX_COMPARED_BYTES = 50 << 20
MAX_COMPARED = 2_000_000  # letters
MAX_COMPARED_LINES = 50_000
MATCHES_OF_A_FILE = 3
DOOR_PORT = 49980  # of the sandbox itself: `cloche.guest.paths`
BINARY_STATUS = 210  # between this program and the host: the host sends the file itself
Reply = Any


class Refused(Exception):
    """The operation's answer is this status with this detail."""

    def __init__(self, status: int, detail: str):
        super().__init__(status, detail)
        self.status, self.detail = status, detail


def check_directory(path: str, detail: str = "Directory not found") -> None:
    if not os.path.isdir(path):
        raise Refused(404, detail)


def check_file(path: str) -> None:
    if not os.path.isfile(path):
        raise Refused(404, "File not found")


# Entries and changes.


def list_directory(directory: str) -> Reply:
    check_directory(directory)
    names = sorted(os.listdir(directory))
    if len(names) > MAX_LISTED:
        raise Refused(400, f"{directory} has {len(names)} entries, over the limit of {MAX_LISTED}: use run_command")
    entries = [each for each in (describe_entry(directory, name) for name in names) if each]
    return {"dir": directory, "writable": os.access(directory, os.W_OK), "entries": entries}


def describe_entry(directory: str, name: str) -> dict[str, Any] | None:
    path = os.path.join(directory, name)
    try:
        about = os.stat(path)
    except OSError:
        return None
    kind = "directory" if os.path.isdir(path) else "file"
    writable = os.access(path, os.W_OK)
    return {"name": name, "type": kind, "size": about.st_size, "modified": about.st_mtime, "writable": writable}


def display(path: str) -> Reply:
    return {"path": path, "exists": os.path.isfile(path)}


def enter(path: str) -> Reply:
    check_directory(path)
    return {"cwd": path}


def view(path: str) -> Reply:
    check_file(path)
    raise Refused(BINARY_STATUS, mimetypes.guess_type(path)[0] or "application/octet-stream")


def write(path: str, content: str) -> Reply:
    data = content.encode()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    return {"path": path, "size": len(data)}


def make_directory(path: str) -> Reply:
    os.makedirs(path, exist_ok=True)
    return {"path": path}


def delete(path: str) -> Reply:
    if not os.path.exists(path):
        raise Refused(404, "Path not found")
    kind = "directory" if os.path.isdir(path) else "file"
    if kind == "directory" and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)
    return {"path": path, "type": kind}


def move(source: str, destination: str) -> Reply:
    if not os.path.exists(source):
        raise Refused(404, "Source path not found")
    if not os.path.isdir(os.path.dirname(destination)):
        raise Refused(400, "Destination parent directory not found")
    if os.path.exists(destination):
        raise Refused(409, "Destination already exists")
    shutil.move(source, destination)
    return {"source": source, "destination": destination}


# Text of files.

LINE_BREAK = re.compile(r"\r\n|[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]")  # as str.splitlines


def replace(path: str, replacements: list[dict[str, Any]]) -> Reply:
    check_file(path)
    with open(path, encoding="utf-8") as file:
        content = file.read()
    for each in replacements:
        content = apply_replacement(content, **each)
    return write(path, content)


def apply_replacement(
    content: str,
    target: str,
    replacement: str,
    start_line: int | None = None,
    end_line: int | None = None,
    allow_multiple: bool = False,
) -> str:
    start, end = line_range(content, start_line, end_line)
    region = content[start:end]
    count = region.count(target)
    if count == 0:
        raise Refused(400, f"Target string not found: {target[:100]!r}")
    if count > 1 and not allow_multiple:
        raise Refused(400, f"Found {count} occurrences of target string but allow_multiple is false")
    return content[:start] + region.replace(target, replacement) + content[max(start, end) :]


def line_range(text: str, first: int | None, last: int | None) -> tuple[int, int]:
    """The offsets of these lines, from 1 on and inclusive."""
    ends = [0, *(match.end() for match in LINE_BREAK.finditer(text))]
    start = (first or 1) - 1
    return ends[start] if start < len(ends) else len(text), ends[last] if last and last < len(ends) else len(text)


def read(path: str, start_line: int | None = None, end_line: int | None = None) -> Reply:
    check_file(path)
    try:
        with open(path, encoding="utf-8") as file:
            return text_reply(path, file, start_line, end_line)
    except UnicodeDecodeError:
        pass
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    if (extract := find_extractor(path)) is not None:
        return text_reply(path, extracted_lines(path, extract), start_line, end_line)
    if kind.startswith("image/"):
        raise Refused(BINARY_STATUS, kind)
    raise Refused(415, f"Unsupported binary file type: {kind} ({os.path.getsize(path)} bytes)")


def text_reply(path: str, parts: Any, first: int | None, last: int | None) -> Reply:
    """Only the selected lines are kept: the others are counted."""
    kept: list[str] = []
    total = size = 0
    for part in parts:
        for line in part.splitlines(keepends=True):
            total += 1
            if total >= (first or 1) and (last is None or total <= last):
                kept.append(line)
                size += len(line)
                if size > MAX_TEXT:
                    raise Refused(413, f"more than {MAX_TEXT} letters: read a part, by start_line and end_line")
    return {"path": path, "content": "".join(kept), "total_lines": total}


def extracted_lines(path: str, extract: Callable[[str], Iterator[str]]) -> Iterator[str]:
    """The text of a document; every paragraph but the last ends a line."""
    try:
        waiting: str | None = None
        for each in extract(path):
            if waiting is not None:
                yield waiting + "\n"
            waiting = each
        if waiting is not None:
            yield waiting
    except ImportError as error:
        raise Refused(415, f"this environment has no package that reads such documents: {error}") from None


def read_pdf(path: str) -> Iterator[str]:
    for page in importlib.import_module("pypdf").PdfReader(path).pages:
        yield page.extract_text() or ""


def read_docx(path: str) -> Iterator[str]:
    for block in importlib.import_module("docx").Document(path).iter_inner_content():
        if hasattr(block, "rows"):
            yield from ("\t".join(cell.text for cell in row.cells) for row in block.rows)
        else:
            yield block.text


def read_xlsx(path: str) -> Iterator[str]:
    book = importlib.import_module("openpyxl").load_workbook(path, read_only=True, data_only=True)
    for sheet in book.worksheets:
        yield f"--- {sheet.title} ---"
        for row in sheet.iter_rows(values_only=True):
            yield "\t".join("" if cell is None else str(cell) for cell in row)


def read_pptx(path: str) -> Iterator[str]:
    for number, slide in enumerate(importlib.import_module("pptx").Presentation(path).slides, 1):
        yield f"--- Slide {number} ---"
        yield from (shape.text_frame.text for shape in slide.shapes if shape.has_text_frame)


def read_odt(path: str) -> Iterator[str]:
    with zipfile.ZipFile(path) as archive, archive.open("content.xml") as content:
        for element in ElementTree.parse(content).iter("{urn:oasis:names:tc:opendocument:xmlns:text:1.0}p"):
            yield "".join(element.itertext())


RTF_TOKEN = re.compile(r"\\([a-zA-Z]+)(-?\d+)? ?|\\'([0-9a-fA-F]{2})|\\([^a-zA-Z])|([{}])|[\r\n]+|([^\\{}\r\n]+)")
RTF_HIDDEN = frozenset("fonttbl colortbl stylesheet info pict object themedata listtable datastore generator".split())
RTF_LETTERS = {"par": "\n", "line": "\n", "tab": "\t", "cell": "|", "row": "\n", "emdash": "—", "endash": "–"}
RTF_LETTERS |= {"lquote": "‘", "rquote": "’", "ldblquote": "“", "rdblquote": "”", "bullet": "•"}


def read_rtf(path: str) -> Iterator[str]:
    with open(path, "rb") as file:
        text = file.read().decode("utf-8", "replace")
    found: list[str] = []
    hidden: list[bool] = [False]
    skip = 0
    for word, number, octet, symbol, brace, plain in RTF_TOKEN.findall(text):
        if brace:
            hidden = [*hidden, hidden[-1]] if brace == "{" else hidden[:-1] or [False]
        elif symbol == "*" or word in RTF_HIDDEN:
            hidden[-1] = True
        elif not hidden[-1]:
            letter = rtf_letter(word, number, octet, symbol) or plain
            if skip and (octet or plain):
                letter, skip = letter[1:], 0
            found.append(letter)
            skip = skip or word == "u"
    yield "".join(found)


def rtf_letter(word: str, number: str, octet: str, symbol: str) -> str:
    if octet:
        return bytes([int(octet, 16)]).decode("cp1252", "replace")
    if word == "u" and number:
        return chr(int(number) % 65536)
    return RTF_LETTERS.get(word, "") or (symbol if symbol in "\\{}" else "\u00a0" if symbol == "~" else "")


EXTRACTORS = {
    ".pdf": read_pdf,
    ".docx": read_docx,
    ".xlsx": read_xlsx,
    ".pptx": read_pptx,
    ".odt": read_odt,
    ".rtf": read_rtf,
}


def find_extractor(path: str) -> Callable[[str], Iterator[str]] | None:
    return EXTRACTORS.get(os.path.splitext(path)[1].lower())


# Searches.


def walk(root: str, show_hidden: bool = True) -> Iterator[tuple[str, str]]:
    """Path and type of all entries below, up to a number."""
    walked = 0
    for directory, directories, names in os.walk(root):
        directories[:] = sorted(name for name in directories if show_hidden or not name.startswith("."))
        found = [(name, "directory") for name in directories] + [(name, "file") for name in names]
        for name, kind in sorted(found):
            if show_hidden or not name.startswith("."):
                walked += 1
                if walked > MAX_WALKED:
                    return
                yield os.path.join(directory, name), kind


def grep(
    path: str,
    query: str,
    regex: bool = True,
    case_insensitive: bool = False,
    include: list[str] | None = None,
    match_per_line: bool = True,
    max_results: int = 50,
) -> Reply:
    if not os.path.exists(path):
        raise Refused(404, "Search path not found")
    try:
        pattern = re.compile(query if regex else re.escape(query), re.IGNORECASE if case_insensitive else 0)
    except re.error as error:
        raise Refused(400, f"Invalid regex: {error}") from None
    files = [path] if os.path.isfile(path) else included_files(path, include)
    matches: list[dict[str, Any]] = []
    for file in files:
        for match in grep_file(file, pattern, match_per_line):
            matches.append(match)
            if len(matches) >= max_results:
                return {"query": query, "path": path, "matches": matches, "truncated": True}
            if not match_per_line:
                break
    return {"query": query, "path": path, "matches": matches, "truncated": False}


def included_files(root: str, include: list[str] | None) -> Iterator[str]:
    for path, kind in walk(root):
        name = os.path.basename(path)
        if kind == "file" and (not include or any(fnmatch.fnmatch(name, each) for each in include)):
            yield path


def grep_file(path: str, pattern: re.Pattern[str], per_line: bool) -> Iterator[dict[str, Any]]:
    for number, line in text_lines(path):
        if pattern.search(line):
            yield (
                {"file": path, "line": number, "content": line.rstrip("\r\n")[:MAX_LINE]}
                if per_line
                else {"file": path}
            )


def text_lines(path: str) -> Iterator[tuple[int, str]]:
    """The lines of a regular file in UTF-8, up to its first byte that is not text."""
    with contextlib.suppress(OSError, ValueError):
        if os.path.isfile(path) and os.path.getsize(path) <= MAX_SEARCHED_BYTES:
            with open(path, encoding="utf-8") as file:
                yield from enumerate(file, 1)


def find_names(
    path: str, query: str = "", limit: int = 20, type: str | None = "any", show_hidden: bool = False
) -> Reply:
    check_directory(path, "Search directory not found")
    wanted = query.strip().lower()

    def candidates() -> Iterator[tuple[int, int, str, dict[str, Any]]]:
        for full, kind in walk(path, show_hidden):
            name = os.path.basename(full)
            low = name.lower()
            if (type not in ("any", kind)) or wanted not in low:
                continue
            with contextlib.suppress(OSError):
                about = os.stat(full)
                shown = {"path": full, "name": name, "type": kind, "size": about.st_size, "modified": about.st_mtime}
                rank = 0 if low == wanted else 1 if low.startswith(wanted) else 2
                yield rank, len(name), os.path.relpath(full, path).lower(), shown

    return {"results": [each[3] for each in heapq.nsmallest(limit, candidates(), key=lambda each: each[:3])]}


def match(path: str, query: str, show_hidden: bool = False, offset: int = 0, limit: int = 100) -> Reply:
    query = query.strip()
    if not query:
        raise Refused(400, "Query must not be blank")
    check_directory(path, "Search directory not found")
    wanted = query.lower()

    def candidates() -> Iterator[tuple[int, int, str, dict[str, Any]]]:
        for full, kind in walk(path, show_hidden):
            relative, name = os.path.relpath(full, path), os.path.basename(full)
            low = name.lower()
            places = (low == wanted, low.startswith(wanted), wanted in low, wanted in relative.lower(), True)
            score = places.index(True)
            lines = matching_lines(full, wanted) if kind == "file" and not os.path.islink(full) else []
            if score < 4 or lines:
                shown = {"path": full, "relative_path": relative, "name": name, "type": kind}
                shown |= {"name_match": score < 4, "content_matches": lines}  # type: ignore[dict-item]
                yield score, len(relative), relative.lower(), shown

    found = heapq.nsmallest(offset + limit + 1, candidates(), key=lambda each: each[:3])
    page = [each[3] for each in found[offset : offset + limit]]
    return {"results": page, "next_offset": offset + limit if len(found) > offset + limit else None}


def matching_lines(path: str, wanted: str) -> list[dict[str, Any]]:
    found = []
    for number, line in text_lines(path):
        index = line.lower().find(wanted)
        if index >= 0:
            column = len(line[:index].encode("utf-16-le", "surrogatepass")) // 2 + 1
            found.append({"line": number, "column": column, "text": line.rstrip("\r\n")[:MAX_LINE]})
            if len(found) == MATCHES_OF_A_FILE:
                break
    return found


def find_pattern(
    path: str, pattern: str, exclude: list[str] | None = None, type: str | None = "any", max_results: int = 50
) -> Reply:
    check_directory(path, "Search directory not found")
    matches = []
    for full, kind in walk(path):
        names = os.path.basename(full), os.path.relpath(full, path)
        wanted = type in ("any", kind) and any(fnmatch.fnmatch(each, pattern) for each in names)
        if not wanted or any(fnmatch.fnmatch(each, out) for each in names for out in exclude or ()):
            continue
        with contextlib.suppress(OSError):
            about = os.stat(full)
            matches.append({"path": names[1], "type": kind, "size": about.st_size, "modified": about.st_mtime})
        if len(matches) >= max_results:
            break
    return {"pattern": pattern, "path": path, "matches": matches, "truncated": len(matches) >= max_results}


# Comparison.


def compare(original: str, revised: str, ignore_whitespace: bool = False) -> Reply:
    sides = [compared_lines(os.path.realpath(each)) for each in (original, revised)]
    (old, left), (new, right) = sides
    keys = [[re.sub(r"\s+", "", each) if ignore_whitespace else each for each in lines] for lines in (left, right)]
    matcher = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    hunks = [make_hunk(group, left, right) for group in matcher.get_grouped_opcodes(3)]
    counted = [line["type"] for hunk in hunks for line in hunk["lines"]]
    return {
        "original": old,
        "revised": new,
        "additions": counted.count("added"),
        "deletions": counted.count("removed"),
        "hunks": hunks,
    }


def compared_lines(path: str) -> tuple[dict[str, Any], list[str]]:
    name = os.path.basename(path)
    if not os.path.isfile(path):
        raise Refused(404, f"{name}: File not found.")
    if os.path.getsize(path) > MAX_COMPARED_BYTES:
        raise Refused(422, f"{name}: it is over the limit of {MAX_COMPARED_BYTES >> 20} MiB")
    extract, notices = find_extractor(path), []
    if extract is not None:
        text = "".join(extracted_lines(path, extract))
        notices.append("Only the text is compared.")
    else:
        with open(path, encoding="utf-8-sig") as file:
            try:
                text = file.read(MAX_COMPARED + 1)
            except UnicodeDecodeError:
                raise Refused(422, f"{name}: it is not text in UTF-8, and no known document") from None
    lines = text.splitlines()
    if len(text) > MAX_COMPARED or len(lines) > MAX_COMPARED_LINES:
        raise Refused(422, f"{name}: over the limit of {MAX_COMPARED} letters or {MAX_COMPARED_LINES} lines")
    return {"path": path, "name": name, "notices": notices}, lines


def make_hunk(group: list[Any], left: list[str], right: list[str]) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    for tag, i, j, k, m in group:
        if tag == "equal":
            for x, y in zip(range(i, j), range(k, m), strict=True):
                line = compared_line("context", x + 1, y + 1, left[x], [{"text": left[x], "changed": False}])
                lines.append({**line, "revisedContent": right[y]})
            continue
        pairs = [split_segments(a, b) for a, b in zip(left[i:j], right[k:m])]  # noqa: B905 - of unequal length
        alone = [[{"text": each, "changed": False}] for each in (*left[i:j], *right[k:m])]
        removed, added = alone[: j - i], alone[j - i :]
        removed[: len(pairs)], added[: len(pairs)] = [each[0] for each in pairs], [each[1] for each in pairs]
        lines += [compared_line("removed", i + n + 1, None, left[i + n], each) for n, each in enumerate(removed)]
        lines += [compared_line("added", None, k + n + 1, right[k + n], each) for n, each in enumerate(added)]
    (_, i, _, k, _), (_, _, j, _, m) = group[0], group[-1]
    starts = i + 1 if j > i else i, k + 1 if m > k else k
    return {"header": f"@@ -{starts[0]},{j - i} +{starts[1]},{m - k} @@", "lines": lines}


def compared_line(kind: str, old: int | None, new: int | None, text: str, segments: Any) -> dict[str, Any]:
    return {"type": kind, "oldNumber": old, "newNumber": new, "content": text, "segments": segments}


def split_segments(old: str, new: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The equal and the changed parts of two lines. Long lines are one part each: it would take too long."""
    if max(len(old), len(new)) > 4096:
        return [{"text": old, "changed": False}], [{"text": new, "changed": False}]
    a, b = (re.findall(r"\w+|[^\w\s]|\s+", each) for each in (old, new))
    left, right = [], []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if i != j:
            left.append({"text": "".join(a[i:j]), "changed": tag != "equal"})
        if k != m:
            right.append({"text": "".join(b[k:m]), "changed": tag != "equal"})
    return left, right


# Skills: directories with a SKILL.md, which begins with its name and description.

SKILL_PLACES = (".agents/skills", ".cptr/skills", ".claude/skills", ".codex/skills")
MAX_SKILLS = 500
MAX_SKILL_BYTES = 1 << 20
MAX_RESOURCES = 50


def list_skills(home: str) -> Reply:
    return [each[0] for each in find_skills(home).values()]


def read_skill(home: str, name: str) -> Reply:
    if (found := find_skills(home).get(name)) is None:
        raise Refused(404, "Skill not found")
    about, body = found
    return {**about, "content": body, "resources": skill_resources(os.path.dirname(about["location"]))}


def find_skills(home: str) -> dict[str, tuple[dict[str, Any], str]]:
    """By name; the first of a name counts."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for place in SKILL_PLACES:
        root = os.path.join(home, place)
        for each in sorted(os.listdir(root) if os.path.isdir(root) else ())[:MAX_SKILLS]:
            location = os.path.join(root, each, "SKILL.md")
            if each.startswith(".") or not os.path.isfile(location) or os.path.getsize(location) > MAX_SKILL_BYTES:
                continue
            with open(location, encoding="utf-8") as file:
                fields, body = split_front_matter(file.read())
            name, description = fields.get("name") or each, fields.get("description", "")
            if description and name not in found:
                about = {"id": f"terminal:{quote(name, safe='')}", "name": name, "description": description[:1024]}
                found[name] = {**about, "location": location, "scope": "global", "source": "terminal"}, body
    return found


def split_front_matter(text: str) -> tuple[dict[str, str], str]:
    end = text.find("\n---", 4) if text.startswith("---\n") else -1
    if end < 0:
        return {}, text.strip()
    fields: dict[str, str] = {}
    block: tuple[str, str] | None = None  # the name and the separator of a value in indented lines
    for line in text[4:end].splitlines():
        if block and line[:1] in (" ", "\t"):
            fields[block[0]] = block[1].join(filter(None, (fields[block[0]], line.strip())))
            continue
        name, colon, value = (each.strip() for each in line.partition(":"))
        block = (name, "\n" if value == "|" else " ") if value in ("|", ">") else None
        if colon and not name.startswith("#"):
            fields[name] = "" if block else value.strip("\"'")
    return fields, text[end + 1 :].partition("\n")[2].strip()


def skill_resources(directory: str, prefix: str = "", depth: int = 0) -> list[str]:
    found: list[str] = []
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if name.startswith(".") or name == "SKILL.md" or len(found) >= MAX_RESOURCES:
            continue
        if os.path.isfile(path):
            found.append(prefix + name)
        elif os.path.isdir(path) and depth < 3:
            found += skill_resources(path, f"{prefix}{name}/", depth + 1)
    return found[:MAX_RESOURCES]


# Archives, ports, notebooks.


def archive(paths: list[str], names: list[str]) -> Reply:
    """Writes a ZIP file, which the host sends and removes. `names` are the paths as the client gave them."""
    if not paths:
        raise Refused(400, "No paths provided")
    for path, name in zip(paths, names, strict=True):
        if not os.path.exists(path):
            raise Refused(404, f"Path not found: {name}")
    handle, made = tempfile.mkstemp(suffix=".zip")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
            for path in paths:
                add_to_archive(target, path)
    except BaseException:
        os.unlink(made)
        raise
    return {
        "archive": made,
        "name": os.path.basename(paths[0].rstrip("/")) or "archive" if len(paths) == 1 else "download",
    }


def add_to_archive(target: zipfile.ZipFile, path: str) -> None:
    base = os.path.basename(path.rstrip("/"))
    if os.path.isfile(path):
        target.write(path, base)
        return
    for full, _ in walk(path):
        if os.path.isfile(full):
            target.write(full, os.path.join(base or "dir", os.path.relpath(full, path)))


def list_ports() -> Reply:
    """The listening TCP ports of programs of this user. Some kernels do not tell a program about its siblings."""
    owners = dict(socket_owners())
    found: dict[int, dict[str, Any]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            for row in map(str.split, lines):
                if len(row) > 9 and row[3] == "0A" and row[7] == str(os.getuid()):
                    port, pid = int(row[1].rpartition(":")[2], 16), owners.get(row[9])
                    if port != DOOR_PORT:
                        name = program_name(pid) if pid else None
                        found.setdefault(port, {"port": port, "pid": pid, "process": name})
    return {"ports": [found[port] for port in sorted(found)]}


def socket_owners() -> Iterator[tuple[str, int]]:
    """(inode, pid) of every socket that this user may see."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for each in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    kind, _, inode = os.readlink(f"/proc/{pid}/fd/{each}").partition(":")
                    if kind == "socket":
                        yield inode.strip("[]"), int(pid)


def program_name(pid: int) -> str | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return None


def open_notebook(path: str) -> Reply:
    if not os.path.isfile(path):
        raise Refused(404, f"Notebook not found: {path}")
    whole = load_notebook(path)
    name = whole.get("metadata", {}).get("kernelspec", {}).get("name", "python3")
    return {"kernel": str(name)[:100]}


def load_notebook(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            whole = json.load(file)
        if not isinstance(whole["cells"], list) or whole["nbformat"] < 4:
            raise ValueError("it has no cells of version 4")
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(400, f"Invalid notebook: {str(error)[:200]}") from None
    found: dict[str, Any] = whole
    return found


def find_cell(whole: dict[str, Any], index: int) -> dict[str, Any]:
    cells = whole["cells"]
    if not 0 <= index < len(cells):
        raise Refused(400, f"cell_index {index} out of range (0..{len(cells) - 1})")
    found: dict[str, Any] = cells[index]
    return found


def notebook_cell(path: str, index: int) -> Reply:
    cell = find_cell(load_notebook(path), index)
    source = cell.get("source", "")
    runs = cell.get("cell_type") == "code"
    return {"source": source if isinstance(source, str) else "".join(source), "runs": runs}


def save_cell(path: str, index: int, source: str, outputs: list[Any], count: int | None) -> Reply:
    whole = load_notebook(path)
    cell = find_cell(whole, index)
    cell["source"] = source.splitlines(keepends=True)
    if cell.get("cell_type") == "code":
        cell["outputs"], cell["execution_count"] = outputs, count
    with open(path, "w", encoding="utf-8") as file:
        json.dump(whole, file, indent=1)
    return {}


OPERATIONS: dict[str, Callable[..., Reply]] = {
    each.__name__: each
    for each in (
        list_directory, display, enter, view, write, make_directory, delete, move, replace, read, grep, find_names,
        match, find_pattern, compare, list_skills, read_skill, archive, list_ports, open_notebook, notebook_cell,
        save_cell,
    )
}  # fmt: skip


def main() -> None:
    asked = json.load(sys.stdin)
    try:
        status, reply = 200, OPERATIONS[asked.pop("operation")](**asked)
    except Refused as refusal:
        status, reply = refusal.status, {"detail": refusal.detail}
    except PermissionError as error:
        status, reply = 403, {"detail": str(error)}
    except (OSError, ValueError) as error:
        status, reply = 400, {"detail": str(error)[:500]}
    sys.stdout.write(f"{status}\n{json.dumps(reply)}")


if __name__ == "__main__":
    main()
