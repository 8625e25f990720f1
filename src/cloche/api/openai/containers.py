"""`/v1/containers`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.http import Edge, while_wanted, whole_body
from cloche.api.openai.context import BadParameter, Door, OpenAiErrors, json_reply
from cloche.api.openai.files import content_reply, is_form, take_form
from cloche.api.openai.network import network_body, network_of
from cloche.api.openai.pagination import PageAsked, check_integer, list_body, page_asked
from cloche.api.openai.responses_request import file_ids_of, json_object, memory_tier, missing, typed
from cloche.gateway.attachments import Attachments
from cloche.gateway.containers import (
    PREFIX,
    Container,
    Wishes,
    age,
    last_active_at,
    minutes_of,
    name_of,
    sandbox_id,
    tier_of,
)
from cloche.model import SandboxInfo
from cloche.network_policy import NetworkPolicy
from cloche.store.files import ContainerFile

MAX_NAME = 512


class Containers:
    def __init__(self, door: Door, dialect: OpenAiErrors):
        self._door = door
        self._containers = door.gateway.containers
        self._files = door.gateway.container_files
        self.routes = [
            Route("/v1/containers", Edge(dialect, self.create), methods=["POST"]),
            Route("/v1/containers", Edge(dialect, self.list), methods=["GET"]),
            Route("/v1/containers/{container}", Edge(dialect, self.get), methods=["GET"]),
            Route("/v1/containers/{container}", Edge(dialect, self.delete), methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        owner = self._door.owner_of(request)
        wishes, file_ids = decode(await whole_body(request), self._door.config.gateway.max_container_minutes)
        attachments = Attachments()
        await attachments.take(self._door.gateway.shelf.files, owner, file_ids)
        container = await while_wanted(request, self._door.engine, self._containers.create(owner, wishes))
        try:
            for attachment in attachments.found.values():
                async with self._files.new_path(container, attachment.name) as path:
                    await self._files.place(container, path, attachment)
        except BaseException:
            await self._delete(owner, container.id)
            raise
        return json_reply(await self._body(container.info))

    async def list(self, request: Request) -> Response:
        owner = self._door.owner_of(request)
        asked = page_asked(request.query_params)
        found = await self._containers.list(owner, request.query_params.get("name") or None)
        page, has_more = await self._page(owner, found, asked)
        return json_reply(list_body([await self._body(info) for info in page], has_more=has_more))

    async def get(self, request: Request) -> Response:
        owner = self._door.owner_of(request)
        return json_reply(await self._body(await self._containers.describe(owner, request.path_params["container"])))

    async def delete(self, request: Request) -> Response:
        owner, id = self._door.owner_of(request), request.path_params["container"]
        await self._delete(owner, id)
        return json_reply({"id": id, "object": "container.deleted", "deleted": True})

    async def _delete(self, owner: str, id: str) -> None:
        """With its files, also those of one that was killed elsewhere, which is no container any more."""
        try:
            await self._containers.delete(owner, id)
        except errors.SandboxNotFound:
            await self._files.forget(owner, sandbox_id(id))
            raise
        await self._files.forget(owner, sandbox_id(id))

    async def _body(self, info: SandboxInfo) -> dict[str, Any]:
        return container_body(info, await self._containers.network_of(info))

    async def _page(
        self, owner: str, newest_first: Sequence[SandboxInfo], asked: PageAsked
    ) -> tuple[Sequence[SandboxInfo], bool]:
        """Whoever deletes what a page shows can still ask for the next one."""
        found = list(newest_first) if asked.order == "desc" else list(reversed(newest_first))
        if asked.after is not None:
            seen = (await self._created_at(owner, asked.after), sandbox_id(asked.after))
            found = [info for info in found if (age(info) < seen if asked.order == "desc" else age(info) > seen)]
        return found[: asked.limit], len(found) > asked.limit

    async def _created_at(self, owner: str, id: str) -> float:
        try:
            return await self._containers.created_at(owner, id)
        except errors.SandboxNotFound:
            raise BadParameter(f"Invalid 'after': there is no container '{id[:100]}'.", "after") from None


class _Expiry(msgspec.Struct):
    anchor: str | None = None
    minutes: int | None = None


class _Body(msgspec.Struct):
    name: str | None = None
    expires_after: _Expiry | None = None
    file_ids: Any = None
    memory_limit: Any = None
    network_policy: Any = None
    skills: list[Any] | None = None


def decode(body: bytes, max_minutes: int) -> tuple[Wishes, tuple[str, ...]]:
    """What a new container should be, and the files for it. Raises InvalidRequest in OpenAI's words."""
    fields: _Body = typed(json_object(body), _Body)
    if not fields.name:
        raise missing("name")
    if len(fields.name) > MAX_NAME:
        raise BadParameter(f"Invalid 'name': {MAX_NAME} characters at most.", "name", "string_above_max_length")
    if fields.skills:
        raise BadParameter("This server has no skills: leave 'skills' out.", "skills")
    wishes = Wishes(
        name=fields.name,
        minutes=None if fields.expires_after is None else _minutes(fields.expires_after, max_minutes),
        memory=memory_tier(fields.memory_limit, "memory_limit"),
        network=network_of(fields.network_policy, "network_policy"),
    )
    return wishes, file_ids_of(fields.file_ids, "file_ids")


def _minutes(expiry: _Expiry, most: int) -> int:
    if expiry.anchor is None or expiry.minutes is None:
        raise missing("expires_after.anchor" if expiry.anchor is None else "expires_after.minutes")
    if expiry.anchor != "last_active_at":
        message = f"Invalid value: '{expiry.anchor[:100]}'. Supported values are: 'last_active_at'."
        raise BadParameter(message, "expires_after.anchor")
    return check_integer("expires_after.minutes", expiry.minutes, 1, most)


def container_body(info: SandboxInfo, network: NetworkPolicy) -> dict[str, Any]:
    return {
        "id": PREFIX + info.id,
        "object": "container",
        "created_at": int(info.created_at),
        "status": "expired" if info.state == "ended" else info.state,
        "expires_after": {"anchor": "last_active_at", "minutes": minutes_of(info)},
        "last_active_at": int(last_active_at(info)),
        "memory_limit": tier_of(info),
        "name": name_of(info),
        "network_policy": network_body(network),
    }


# `/v1/containers/{id}/files`.

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
