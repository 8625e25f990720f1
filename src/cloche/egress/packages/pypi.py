"""Projects and files of the simple indexes that this host uses."""

from __future__ import annotations

import msgspec

from cloche.egress.packages import simple
from cloche.egress.packages.files import Reference
from cloche.egress.packages.pages import Convert, Pages
from cloche.egress.packages.problems import NotThere, UpstreamError
from cloche.egress.packages.simple import Project
from cloche.egress.packages.threads import Threads
from cloche.egress.packages.upstream import Upstream

METADATA = ".metadata"

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
        self._threads = threads

    async def project(self, name: str) -> tuple[str, Project]:
        """Of a normalised name, and the index that has it. Raises NotThere, UpstreamError.

        An index that does not answer is not passed over: the next one could have another project of that name.
        """
        for index in self.indexes:
            try:
                page = await self._pages.get(self.upstream, f"{index}{name}/", simple.ACCEPT, _reader(name))
            except NotThere:
                continue
            return index, await self._threads.run(_DECODER.decode, page.body)
        raise NotThere("no package index of this host has it")

    async def file(self, project: str, filename: str) -> tuple[str, Reference]:
        """A file that the project's page names, or its metadata. Raises NotThere, UpstreamError."""
        index, page = await self.project(project)
        file = page.file(filename)
        if file is not None:
            return index, Reference(file.url, file.digest)
        file = page.file(filename.removesuffix(METADATA))
        if file is None or file.metadata is None:
            raise NotThere("the project's page names no such file")
        return index, Reference(_beside(file.url), file.metadata_digest)


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
