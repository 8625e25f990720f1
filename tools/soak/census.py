"""What a server and all below it hold, counted from outside, by the kernel's own books."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Books of what was: they are pruned by age or size, not when a sandbox ends.
HISTORY = frozenset(
    {"sandboxes", "steps", "chat_calls", "code_sessions", "code_workspaces", "code_room", "keys", "usage"}
)
_CELL = re.compile(r"cell-")
_LISTEN = "0A"
_PAGE = os.sysconf("SC_PAGESIZE")


class Memory(NamedTuple):
    server_rss: int
    all_pss: int  # of the server, its nurseries and the cells


class Sample(NamedTuple):
    at: float
    start: int  # which start of the server
    memory: Memory


class Census(NamedTuple):
    processes: int
    threads: int  # of the server
    descriptors: int  # of the server, without connections that clients keep open
    sockets: int  # of these
    cgroups: int
    mounts: int  # in the server's own namespace
    network_namespaces: int
    instances: int  # directories of live servers
    server_rss: int
    all_pss: int  # of the server, its nursery and the pool
    files: int  # in the data directory, but for the template, the store and what it logs
    file_bytes: int
    rows: dict[str, int]
    history_rows: int


def memory(pid: int) -> Memory:
    everyone = [pid, *descendants(pid)]
    return Memory(_rss(pid), sum(_pss(each) for each in everyone))


def take(pid: int, data_dir: Path) -> Census:
    below = descendants(pid)
    rows = _rows(data_dir / "store.sqlite3")
    files, held = list(_files(data_dir)), memory(pid)
    open_files = _open_files(pid)
    return Census(
        processes=len(below),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        descriptors=len(open_files),
        sockets=sum(each.startswith("socket:") for each in open_files),
        cgroups=len(_cgroups([pid, *below])),
        mounts=len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()),
        network_namespaces=len({_namespace(each) for each in below} - {""}),
        instances=sum(1 for each in (data_dir / "run").iterdir() if each.is_dir()),
        server_rss=held.server_rss,
        all_pss=held.all_pss,
        files=len(files),
        file_bytes=sum(files),
        rows={name: count for name, count in rows.items() if name not in HISTORY},
        history_rows=sum(count for name, count in rows.items() if name in HISTORY),
    )


def unlisted(data_dir: Path) -> dict[str, list[str]]:
    """By owner, what no list of the API shows: the paths under which it can be deleted."""
    found: dict[str, list[str]] = {}
    db = sqlite3.connect(f"file:{data_dir / 'store.sqlite3'}?mode=ro", uri=True, timeout=10)
    try:
        for owner, id in db.execute("SELECT owner, id FROM responses"):
            found.setdefault(owner, []).append(f"/v1/responses/{id}")
        for owner, session, id in db.execute("SELECT owner, session, id FROM code_files"):
            found.setdefault(owner, []).append(f"/librechat/v1/files/{session}/{id}?kind=user&id=u")
    finally:
        db.close()
    return found


def descendants(pid: int) -> list[int]:
    below: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return below
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            below += [child, *descendants(child)]
    return below


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return 0


def _pss(pid: int) -> int:
    """0 where the kernel does not let us see, as with processes of another identity."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def _open_files(pid: int) -> list[str]:
    """What its descriptors lead to, but for connections that clients have opened and keep for later."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(path))
        except OSError:
            continue
    kept = _connections({each[len("socket:[") : -1] for each in found if each.startswith("socket:[")})
    return [each for each in found if each not in kept]


def _connections(inodes: set[str]) -> set[str]:
    """Of these sockets, those whose port is one on which another of them listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [(row[1].rsplit(":", 1)[1], row[3], row[9]) for row in rows if row[9] in inodes]
    listening = {port for port, state, _ in ours if state == _LISTEN}
    return {f"socket:[{inode}]" for port, state, inode in ours if port in listening and state != _LISTEN}


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _cgroups(pids: list[int]) -> set[Path]:
    """The directories of cells, beside those that our processes are in."""
    roots = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            _, kind, path = line.split(":", 2)
            if "/cloche-" in path:
                roots.add(Path("/sys/fs/cgroup", kind, path.lstrip("/")).parent)
    return {each for root in roots if root.is_dir() for each in root.iterdir() if _CELL.match(each.name)}


def _files(data_dir: Path) -> Iterator[int]:
    """The size of each."""
    for directory, _, names in os.walk(data_dir):
        above = Path(directory).relative_to(data_dir).parts
        if above[:1] in (("templates",), ("audit",)):
            continue
        for name in names:
            if not name.startswith("store.sqlite3"):
                try:
                    yield os.lstat(Path(directory, name)).st_size
                except FileNotFoundError:
                    continue


def _rows(store: Path) -> dict[str, int]:
    db = sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=10)
    try:
        names = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: db.execute(f'SELECT COUNT(*) FROM "{name}"').fetchone()[0] for name in sorted(names)}
    finally:
        db.close()
