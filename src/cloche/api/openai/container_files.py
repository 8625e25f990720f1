"""`/v1/containers/{id}/files`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.http import Edge, whole_body
from cloche.api.openai.decoding import json_object, missing
from cloche.api.openai.dialect import BadParameter, OpenAiErrors
from cloche.api.openai.door import Door, json_reply
from cloche.api.openai.forms import content_reply, is_form, take_form
from cloche.api.openai.pagination import PageAsked, list_body, page_asked
from cloche.gateway.attachments import Attachments
from cloche.gateway.containers import PREFIX, Container, sandbox_id
from cloche.store.files import ContainerFile

PATH = "/v1/containers/{container}/files"


class ContainerFiles:
    """A container that has expired still has the files that are kept, to be read."""

    def __init__(self, door: Door, dialect: OpenAiErrors):
        self._door = door
        self._containers = door.gateway.containers
        self._files = door.gateway.container_files
        self.routes = [
            Route(PATH, Edge(dialect, self.create), methods=["POST"]),
            Route(PATH, Edge(dialect, self.list), methods=["GET"]),
            Route(PATH + "/{id}", Edge(dialect, self.get), methods=["GET"]),
            Route(PATH + "/{id}", Edge(dialect, self.delete), methods=["DELETE"]),
            Route(PATH + "/{id}/content", Edge(dialect, self.content), methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        container = await self._containers.get(self._door.owner_of(request), request.path_params["container"])
        if is_form(request):
            file = await self._upload(container, request)
        else:
            file = await self._copy(container, file_id_of(json_object(await whole_body(request))))
        return json_reply(container_file_body(file))

    async def list(self, request: Request) -> Response:
        owner, id = self._door.owner_of(request), request.path_params["container"]
        asked = page_asked(request.query_params)
        try:
            found: Sequence[ContainerFile] = await self._files.list(await self._containers.get(owner, id))
        except errors.Gone:
            found = await self._files.list_kept(owner, sandbox_id(id))
        page, has_more = page_after(found, asked)
        return json_reply(list_body([container_file_body(file) for file in page], has_more=has_more))

    async def get(self, request: Request) -> Response:
        _, file = await self._asked(request)
        return json_reply(container_file_body(file))

    async def content(self, request: Request) -> Response:
        container, file = await self._asked(request)
        size, chunks = await self._files.open(container, file)
        return content_reply(file.name, size, chunks, None if container is None else container.sandbox.wait_ended)

    async def delete(self, request: Request) -> Response:
        container = await self._containers.get(self._door.owner_of(request), request.path_params["container"])
        file = await self._files.find(container, request.path_params["id"])
        await self._files.remove(container, file)
        return json_reply({"id": file.id, "object": "container.file.deleted", "deleted": True})

    async def _asked(self, request: Request) -> tuple[Container | None, ContainerFile]:
        owner, id, file = self._door.owner_of(request), request.path_params["container"], request.path_params["id"]
        try:
            container = await self._containers.get(owner, id)
        except errors.Gone:
            return None, await self._files.get_kept(owner, sandbox_id(id), file)
        return container, await self._files.get(container, file)

    async def _upload(self, container: Container, request: Request) -> ContainerFile:
        uploaded: list[ContainerFile] = []

        async def take(name: str, chunks: AsyncGenerator[bytes, None]) -> None:
            async with self._files.new_path(container, name) as path:
                uploaded.append(await self._files.upload(container, path, chunks))

        try:
            fields = await take_form(request, self._door.config.server.upload_bytes, take)
        except BaseException:
            for file in uploaded:
                await self._files.remove(container, await self._files.find(container, file.id))
            raise
        return uploaded[0] if uploaded else await self._copy(container, file_id_of(fields))

    async def _copy(self, container: Container, file_id: str) -> ContainerFile:
        attachments = Attachments()
        await attachments.take(self._door.gateway.shelf.files, container.owner, (file_id,))
        (attachment,) = attachments.found.values()
        async with self._files.new_path(container, attachment.name) as path:
            return await self._files.place(container, path, attachment)


def file_id_of(fields: dict[str, Any]) -> str:
    """Raises InvalidRequest."""
    file_id = fields.get("file_id")
    if file_id is None:
        raise missing("file")
    if not isinstance(file_id, str):
        raise BadParameter("Invalid type for 'file_id': expected a string.", "file_id", "invalid_type")
    return file_id


def page_after(oldest_first: Sequence[ContainerFile], asked: PageAsked) -> tuple[Sequence[ContainerFile], bool]:
    """Ids sort by age, so that a page goes on after a file that is gone."""
    found = list(oldest_first) if asked.order == "asc" else list(reversed(oldest_first))
    if asked.after is not None:
        after = asked.after
        found = [file for file in found if (file.id > after if asked.order == "asc" else file.id < after)]
    return found[: asked.limit], len(found) > asked.limit


def container_file_body(file: ContainerFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "container.file",
        "created_at": int(file.created_at),
        "bytes": file.bytes,
        "container_id": PREFIX + file.sandbox,
        "path": file.path,
        "source": file.source,
    }
