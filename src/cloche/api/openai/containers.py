"""`/v1/containers`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.dialect import json_reply
from cloche.api.http import create_unless_disconnected, read_decoded
from cloche.api.openai.context import BadParameter, OpenAiContext
from cloche.api.openai.files import content_reply, is_form, take_form
from cloche.api.openai.network import decode_network, network_body
from cloche.api.openai.pagination import PageRequest, check_integer, decode_page, list_body
from cloche.api.openai.responses_request import (
    convert_typed,
    decode_memory_tier,
    file_ids_of,
    json_object,
    missing_parameter,
)
from cloche.gateway.attachments import Attachments
from cloche.gateway.containers import (
    CONTAINER_ID_PREFIX,
    Container,
    ContainerOptions,
    age_key,
    container_name,
    idle_minutes,
    last_active_at,
    memory_tier_of,
    to_sandbox_id,
)
from cloche.model import SandboxInfo
from cloche.network_policy import NetworkPolicy
from cloche.store.files import StoredContainerFile

MAX_CONTAINER_NAME = 512


class ContainerRoutes:
    def __init__(self, api: OpenAiContext):
        self._api = api
        self._containers = api.gateway.containers
        self._files = api.gateway.container_files
        self.routes = [
            api.route("POST", "/v1/containers", self.create),
            api.route("GET", "/v1/containers", self.list),
            api.route("GET", "/v1/containers/{container}", self.get),
            api.route("DELETE", "/v1/containers/{container}", self.delete),
        ]

    async def create(self, request: Request) -> Response:
        owner = self._api.owner(request)
        most = self._api.config.gateway.max_container_minutes
        wishes, file_ids = await read_decoded(request, lambda body: decode_container(body, most))
        attachments = Attachments()
        await attachments.take(self._api.gateway.gateway_store.files, owner, file_ids)
        container = await create_unless_disconnected(request, self._api.engine, self._containers.create(owner, wishes))
        try:
            for attachment in attachments.found.values():
                async with self._files.reserve_path(container, attachment.name) as path:
                    await self._files.place(container, path, attachment)
        except BaseException:
            await self._delete_container(owner, container.id)
            raise
        return json_reply(await self._container_body(container.info))

    async def list(self, request: Request) -> Response:
        owner = self._api.owner(request)
        message = decode_page(request.query_params)
        found = await self._containers.list(owner, request.query_params.get("name") or None)
        page, has_more = await self._list_page(owner, found, message)
        return json_reply(list_body([await self._container_body(info) for info in page], has_more=has_more))

    async def get(self, request: Request) -> Response:
        owner = self._api.owner(request)
        return json_reply(
            await self._container_body(await self._containers.describe(owner, request.path_params["container"]))
        )

    async def delete(self, request: Request) -> Response:
        owner, id = self._api.owner(request), request.path_params["container"]
        await self._delete_container(owner, id)
        return json_reply({"id": id, "object": "container.deleted", "deleted": True})

    async def _delete_container(self, owner: str, id: str) -> None:
        """Deletes a container with its files, also the files of one that was killed by another API."""
        try:
            await self._containers.delete(owner, id)
        except errors.SandboxNotFound:
            await self._files.forget(owner, to_sandbox_id(id))
            raise
        await self._files.forget(owner, to_sandbox_id(id))

    async def _container_body(self, info: SandboxInfo) -> dict[str, Any]:
        return container_body(info, await self._containers.network_of(info))

    async def _list_page(
        self, owner: str, newest_first: Sequence[SandboxInfo], page: PageRequest
    ) -> tuple[Sequence[SandboxInfo], bool]:
        """A client that deletes the items of a page can still request the next one."""
        found = list(newest_first) if page.order == "desc" else list(reversed(newest_first))
        if page.after is not None:
            seen = (await self._created_at(owner, page.after), to_sandbox_id(page.after))
            found = [info for info in found if (age_key(info) < seen if page.order == "desc" else age_key(info) > seen)]
        return found[: page.limit], len(found) > page.limit

    async def _created_at(self, owner: str, id: str) -> float:
        try:
            return await self._containers.created_at(owner, id)
        except errors.SandboxNotFound:
            raise BadParameter(f"Invalid 'after': there is no container '{id[:100]}'.", "after") from None


class _ContainerExpiry(msgspec.Struct):
    anchor: str | None = None
    minutes: int | None = None


class _ContainerBody(msgspec.Struct):
    name: str | None = None
    expires_after: _ContainerExpiry | None = None
    file_ids: Any = None
    memory_limit: Any = None
    network_policy: Any = None
    skills: list[Any] | None = None


def decode_container(body: bytes, max_minutes: int) -> tuple[ContainerOptions, tuple[str, ...]]:
    """Returns the settings of a new container, and its files. Raises InvalidRequest in OpenAI's words."""
    fields: _ContainerBody = convert_typed(json_object(body), _ContainerBody)
    if not fields.name:
        raise missing_parameter("name")
    if len(fields.name) > MAX_CONTAINER_NAME:
        raise BadParameter(
            f"Invalid 'name': {MAX_CONTAINER_NAME} characters at most.", "name", "string_above_max_length"
        )
    if fields.skills:
        raise BadParameter("This server has no skills: leave 'skills' out.", "skills")
    wishes = ContainerOptions(
        name=fields.name,
        minutes=None if fields.expires_after is None else _expiry_minutes(fields.expires_after, max_minutes),
        memory=decode_memory_tier(fields.memory_limit, "memory_limit"),
        network=decode_network(fields.network_policy, "network_policy"),
    )
    return wishes, file_ids_of(fields.file_ids, "file_ids")


def _expiry_minutes(expiry: _ContainerExpiry, most: int) -> int:
    if expiry.anchor is None or expiry.minutes is None:
        raise missing_parameter("expires_after.anchor" if expiry.anchor is None else "expires_after.minutes")
    if expiry.anchor != "last_active_at":
        message = f"Invalid value: '{expiry.anchor[:100]}'. Supported values are: 'last_active_at'."
        raise BadParameter(message, "expires_after.anchor")
    return check_integer("expires_after.minutes", expiry.minutes, 1, most)


def container_body(info: SandboxInfo, network: NetworkPolicy) -> dict[str, Any]:
    return {
        "id": CONTAINER_ID_PREFIX + info.id,
        "object": "container",
        "created_at": int(info.created_at),
        "status": "expired" if info.state == "ended" else info.state,
        "expires_after": {"anchor": "last_active_at", "minutes": idle_minutes(info)},
        "last_active_at": int(last_active_at(info)),
        "memory_limit": memory_tier_of(info),
        "name": container_name(info),
        "network_policy": network_body(network),
    }


# `/v1/containers/{id}/files`.

CONTAINER_FILES_PATH = "/v1/containers/{container}/files"


class ContainerFileRoutes:
    """The routes of container files. Stored files of an expired container can still be read."""

    def __init__(self, api: OpenAiContext):
        self._api = api
        self._containers = api.gateway.containers
        self._files = api.gateway.container_files
        self.routes = [
            api.route("POST", CONTAINER_FILES_PATH, self.create),
            api.route("GET", CONTAINER_FILES_PATH, self.list),
            api.route("GET", CONTAINER_FILES_PATH + "/{id}", self.get),
            api.route("DELETE", CONTAINER_FILES_PATH + "/{id}", self.delete),
            api.route("GET", CONTAINER_FILES_PATH + "/{id}/content", self.content),
        ]

    async def create(self, request: Request) -> Response:
        container = await self._containers.get(self._api.owner(request), request.path_params["container"])
        if is_form(request):
            file = await self._upload_file(container, request)
        else:
            file = await self._copy_file(container, file_id_of(await read_decoded(request, json_object)))
        return json_reply(container_file_body(file))

    async def list(self, request: Request) -> Response:
        owner, id = self._api.owner(request), request.path_params["container"]
        message = decode_page(request.query_params)
        try:
            found: Sequence[StoredContainerFile] = await self._files.list(await self._containers.get(owner, id))
        except errors.Gone:
            found = await self._files.list_kept(owner, to_sandbox_id(id))
        page, has_more = page_after(found, message)
        return json_reply(list_body([container_file_body(file) for file in page], has_more=has_more))

    async def get(self, request: Request) -> Response:
        _, file = await self._requested_file(request)
        return json_reply(container_file_body(file))

    async def content(self, request: Request) -> Response:
        container, file = await self._requested_file(request)
        size, chunks = await self._files.open(container, file)
        return content_reply(file.name, size, chunks, None if container is None else container.sandbox.wait_ended)

    async def delete(self, request: Request) -> Response:
        container = await self._containers.get(self._api.owner(request), request.path_params["container"])
        file = await self._files.find(container, request.path_params["id"])
        await self._files.remove(container, file)
        return json_reply({"id": file.id, "object": "container.file.deleted", "deleted": True})

    async def _requested_file(self, request: Request) -> tuple[Container | None, StoredContainerFile]:
        owner, id, file = self._api.owner(request), request.path_params["container"], request.path_params["id"]
        try:
            container = await self._containers.get(owner, id)
        except errors.Gone:
            return None, await self._files.get_kept(owner, to_sandbox_id(id), file)
        return container, await self._files.get(container, file)

    async def _upload_file(self, container: Container, request: Request) -> StoredContainerFile:
        uploaded: list[StoredContainerFile] = []

        async def take(name: str, chunks: AsyncGenerator[bytes, None]) -> None:
            async with self._files.reserve_path(container, name) as path:
                uploaded.append(await self._files.upload(container, path, chunks))

        try:
            fields = await take_form(request, self._api.config.server.upload_bytes, take)
        except BaseException:
            for file in uploaded:
                await self._files.remove(container, await self._files.find(container, file.id))
            raise
        return uploaded[0] if uploaded else await self._copy_file(container, file_id_of(fields))

    async def _copy_file(self, container: Container, file_id: str) -> StoredContainerFile:
        attachments = Attachments()
        await attachments.take(self._api.gateway.gateway_store.files, container.owner, (file_id,))
        (attachment,) = attachments.found.values()
        async with self._files.reserve_path(container, attachment.name) as path:
            return await self._files.place(container, path, attachment)


def file_id_of(fields: dict[str, Any]) -> str:
    """Raises InvalidRequest."""
    file_id = fields.get("file_id")
    if file_id is None:
        raise missing_parameter("file")
    if not isinstance(file_id, str):
        raise BadParameter("Invalid type for 'file_id': expected a string.", "file_id", "invalid_type")
    return file_id


def page_after(
    oldest_first: Sequence[StoredContainerFile], page: PageRequest
) -> tuple[Sequence[StoredContainerFile], bool]:
    """Ids sort by age, so that a page goes on after a file that is gone."""
    found = list(oldest_first) if page.order == "asc" else list(reversed(oldest_first))
    if page.after is not None:
        after = page.after
        found = [file for file in found if (file.id > after if page.order == "asc" else file.id < after)]
    return found[: page.limit], len(found) > page.limit


def container_file_body(file: StoredContainerFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "container.file",
        "created_at": int(file.created_at),
        "bytes": file.bytes,
        "container_id": CONTAINER_ID_PREFIX + file.sandbox,
        "path": file.path,
        "source": file.source,
    }
