"""Projects and files of the simple indexes that this host uses."""

from __future__ import annotations

import msgspec

from cloche.egress.packages import simple
from cloche.egress.packages.files import Reference
from cloche.egress.packages.memory import Made
from cloche.egress.packages.pages import Convert, Page, Pages
from cloche.egress.packages.problems import NotThere, UpstreamError
from cloche.egress.packages.simple import File, Project
from cloche.egress.packages.threads import Threads
from cloche.egress.packages.upstream import Upstream

METADATA = ".metadata"
MEMORY_BYTES = 16 << 20  # of pages as we write them, and as much of their files
FILES_FACTOR = 4  # so many times a page's length its files take, or so

_DECODER = msgspec.json.Decoder(Project)


class PyPI:
    """`indexes` are asked in their order, and the first that has a project is the only one that counts for it.

    Were their files put together, whoever registers the name of a private project at a public index, with a higher
    version, would be installed in its place.
    """

    def __init__(self, indexes: tuple[str, ...], upstream: Upstream, pages: Pages, threads: Threads):
        self.indexes = indexes
        self.upstream = upstream
        self._pages = pages
        self._written: Made[Page, bytes] = Made(MEMORY_BYTES, threads)
        self._files: Made[Page, dict[str, File]] = Made(MEMORY_BYTES, threads)

    async def project(self, name: str, as_json: bool) -> tuple[str, bytes]:
        """Its page as we write it, of a normalised name, and the index that has it. Raises NotThere, UpstreamError."""
        index, page = await self._page(name)
        make = _as_json if as_json else _as_html
        return index, await self._written.of(page, (name, as_json), 2 * len(page.body), make)

    async def _page(self, name: str) -> tuple[str, Page]:
        """Raises NotThere, UpstreamError.

        An index that does not answer is not passed over: the next one could have another project of that name.
        """
        for index in self.indexes:
            try:
                return index, await self._pages.get(self.upstream, f"{index}{name}/", simple.ACCEPT, _reader(name))
            except NotThere:
                continue
        raise NotThere("no package index of this host has it")

    async def file(self, project: str, filename: str) -> tuple[str, Reference]:
        """A file that the project's page names, or its metadata. Raises NotThere, UpstreamError."""
        index, page = await self._page(project)
        files = await self._files.of(page, project, FILES_FACTOR * len(page.body), _files)
        file = files.get(filename)
        if file is not None:
            return index, Reference(file.url, file.digest)
        file = files.get(filename.removesuffix(METADATA))
        if file is None or file.metadata is None:
            raise NotThere("the project's page names no such file")
        return index, Reference(_beside(file.url), file.metadata_digest)


def _as_json(page: Page) -> bytes:
    return simple.write_json(_DECODER.decode(page.body))


def _as_html(page: Page) -> bytes:
    return simple.write_html(_DECODER.decode(page.body))


def _files(page: Page) -> dict[str, File]:
    return {file.name: file for file in _DECODER.decode(page.body).files}


def _beside(url: str) -> str:
    path, question, query = url.partition("?")
    return path + METADATA + question + query


def _reader(name: str) -> Convert:
    def convert(body: bytes, content_type: str, url: str) -> bytes:
        try:
            return msgspec.json.encode(simple.read(name, body, content_type, url))
        except simple.BadPage as error:
            raise UpstreamError(str(error)) from None

    return convert
