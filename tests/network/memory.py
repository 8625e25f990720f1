"""What the processes of a sandbox have in their memory, as the host sees it."""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cloche.engine.sandboxes.sandbox import Sandbox


def processes_of(box: Sandbox) -> list[Path]:
    """All of them, as the host sees them: those of init's pid namespace."""
    [init] = re.findall(r"^Pid:\s*(\d+)", Path(f"/proc/self/fdinfo/{box._cell._pidfd}").read_text(), re.MULTILINE)
    theirs = os.readlink(f"/proc/{init}/ns/pid")
    return [each for each in Path("/proc").glob("[0-9]*") if _link(each / "ns/pid") == theirs]


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def memory_of(process: Path) -> Iterator[bytes]:
    with open(process / "maps") as maps, open(process / "mem", "rb", buffering=0) as memory:
        for line in maps:
            span, rights, _, device, *_ = line.split()
            if not rights.startswith("rw") and (device != "00:00" or "[v" in line or rights[0] != "r"):
                continue  # a file, as it is for everybody
            first, last = (int(each, 16) for each in span.split("-"))
            try:
                memory.seek(first)
                yield memory.read(last - first)
            except (OSError, OverflowError):
                continue  # what was mapped meanwhile


def found_in_memory(box: Sandbox, wanted: list[bytes]) -> dict[bytes, int]:
    found = dict.fromkeys(wanted, 0)
    for process in processes_of(box):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has ended meanwhile
            for part in [(process / "environ").read_bytes(), (process / "cmdline").read_bytes(), *memory_of(process)]:
                for each in wanted:
                    found[each] += each in part
    return found


def shapes(core: str) -> list[bytes]:
    """What must be nowhere: a part of values as it is, and in base64 after whatever."""
    return [core.encode(), *(base64.b64encode(b"?" * n + core.encode())[4:20] for n in range(3))]
