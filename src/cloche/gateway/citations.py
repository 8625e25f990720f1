"""Citations of a container's files: those that a message links, and pictures that code has shown."""

from __future__ import annotations

import re
from urllib.parse import unquote

from cloche.gateway.items import Item
from cloche.gateway.pictures import Picture
from cloche.gateway.sight import Sight
from cloche.gateway.workplace import Workplace
from cloche.model import FileInfo

MAX_CITATIONS = 100
MAX_READINGS = 4  # of one link: names may have blanks and brackets, and so may what follows them
MAX_LINK = 1024

_START = re.compile(r"sandbox:(?=/mnt/data/)")
_PLAIN = re.compile(r"[^)\s\"'<>\]`|]+")
_SENTENCE_END = ".,;:!?*_"


class Citations:
    def __init__(self, workplace: Workplace | None, *, every_file: bool):
        self._workplace = workplace
        self._every_file = every_file
        self._pictures: list[Picture] = []
        self._files: dict[str, FileInfo] = {}

    def saw(self, sight: Sight) -> None:
        """An execution showed this."""
        self._pictures += sight.pictures
        self._files |= sight.files

    async def of(self, part: Item, *, final: bool) -> list[Item]:
        """Annotations of one part of a message. Pictures and new files belong to the last message."""
        if self._workplace is None or part.get("type") != "output_text":
            return []
        links = await self._links(part["text"])
        if not final:
            return links
        shown = [await self._workplace.cite_picture(each) for each in self._pictures[:MAX_CITATIONS]]
        self._pictures = []
        return [*filter(None, shown), *links, *await self._unlinked(links)]

    async def _links(self, text: str) -> list[Item]:
        found = []
        for start in list(_START.finditer(text))[:MAX_CITATIONS]:
            citation = await self._link(text, start.start(), start.end())
            if citation is not None:
                found.append(citation)
        return found

    async def _link(self, text: str, start: int, path_start: int) -> Item | None:
        """The citation of the first reading of a link that names a file."""
        assert self._workplace is not None
        for end in readings(text, start, path_start):
            path = text[path_start:end]
            for each in dict.fromkeys((path, unquote(path))):
                citation = await self._workplace.cite_link(each)
                if citation is not None:
                    return {**citation, "start_index": start, "end_index": end}
        return None

    async def _unlinked(self, links: list[Item]) -> list[Item]:
        if not self._every_file:
            return []
        assert self._workplace is not None
        linked = {each["file_id"] for each in links}
        cited = [await self._workplace.cite_link(path) for path in list(self._files)[:MAX_CITATIONS]]
        return [each for each in cited if each is not None and each["file_id"] not in linked]


def readings(text: str, start: int, path_start: int) -> list[int]:
    """Where a link that starts there may end, the likeliest first.

    In `[a](sandbox:/mnt/data/x (1).csv)` that is the last bracket of the line which closes one of its own, as Markdown
    sees it; in `<sandbox:..>` the angle; elsewhere the first blank, and not the full stop of a sentence.
    """
    line = text[path_start : path_start + MAX_LINK].partition("\n")[0]
    ends = []
    if text[max(start - 1, 0) : start] == "<":
        ends = [line.find(">")]
    elif text[max(start - 2, 0) : start] == "](":
        ends = [at for at, each in enumerate(line) if each == ")" and _balanced(line[:at])][:MAX_READINGS]
    plain = _PLAIN.match(line)
    if plain is not None:
        ends += [plain.end(), len(plain[0].rstrip(_SENTENCE_END))]
    return [path_start + end for end in dict.fromkeys(ends) if end > 0]


def _balanced(text: str) -> bool:
    return text.count("(") == text.count(")")
