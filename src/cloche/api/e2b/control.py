"""The control plane: sandboxes are made, found, listed and ended."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.e2b import (
    builds,
    control_absent,
    control_network,
    control_pauses,
    control_reports,
    control_snapshots,
    control_templates,
    control_time,
    control_volumes,
)
from cloche.api.e2b.control_replies import created, detail, listed
from cloche.api.e2b.control_wire import Listing, Wanted, listing, metadata_filter, page_token, wanted
from cloche.api.e2b.desk import Desk
from cloche.api.e2b.repeats import Repeats
from cloche.api.e2b.replies import json_reply, microseconds
from cloche.api.e2b.residents import Resident, Residents, alias_of, notes_of, template_id, template_name
from cloche.api.http import while_wanted
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.model import SandboxInfo, SandboxSpec, Template, new_id


def routes(
    engine: Engine, gatekeeper: Gatekeeper, residents: Residents, config: Config, secret: bytes
) -> list[BaseRoute]:
    desk = Desk(engine, gatekeeper, residents, config)
    return [
        *control_reports.routes(desk),  # first, as `/sandboxes/metrics` could be an id as well
        *_routes(desk),
        *control_time.routes(desk),
        *control_pauses.routes(desk),
        *control_snapshots.routes(desk),
        *control_network.routes(desk),
        *control_volumes.routes(desk, secret),
        *builds.routes(desk, config, secret),  # before the templates, whose names may be paths
        *control_templates.routes(desk, config),
        *control_absent.routes(desk),
    ]


def _routes(desk: Desk) -> list[BaseRoute]:
    plane = Control(desk)
    return [
        desk.route("POST", "/v2/sandboxes", partial(plane.create, version=2)),
        desk.route("POST", "/sandboxes", partial(plane.create, version=1)),
        desk.route("GET", "/v2/sandboxes", plane.list_page),
        desk.route("GET", "/sandboxes", plane.list_all),
        desk.route("GET", "/sandboxes/{id}", plane.get),
        desk.route("DELETE", "/sandboxes/{id}", plane.kill),
    ]


class Control:
    def __init__(self, desk: Desk):
        self._desk = desk
        self._repeats = Repeats()
        desk.engine.housing.admission.shut_out.hear(self._repeats.end)

    async def create(self, request: Request, *, version: int) -> Response:
        owner = self._desk.owner(request)
        body = await self._desk.body(request)
        make = partial(self._make, owner, wanted(body, version=version))
        key = request.headers.get("idempotency-key")
        asked = b"%d:%s" % (version, body)
        making = make() if key is None else self._repeats.once(owner, key, asked, make)
        resident = await while_wanted(request, self._desk.engine, making)
        return json_reply(created(resident, self._desk.domain), 201)

    async def get(self, request: Request) -> Response:
        return json_reply(detail(await self._desk.resident(request), self._desk.domain))

    async def kill(self, request: Request) -> Response:
        await self._desk.engine.kill(self._desk.id(request), self._desk.owner(request))
        return Response(status_code=204)

    async def list_page(self, request: Request) -> Response:
        asked = listing(request.query_params)
        found = self._found(self._desk.owner(request), asked)
        page, rest = found[: asked.limit], found[asked.limit :]
        headers = {"X-Next-Token": page_token(*_position(page[-1]))} if rest else {}
        return json_reply([listed(each) for each in page], headers=headers)

    async def list_all(self, request: Request) -> Response:
        """Version 1, which has no pages, and none that are paused."""
        asked = Listing(metadata=metadata_filter(request.query_params.get("metadata", "")), states=("running",))
        return json_reply([listed(each) for each in self._found(self._desk.owner(request), asked)])

    async def _make(self, owner: str, wanted: Wanted) -> Resident:
        self._desk.check_timeout("timeout", wanted.timeout_seconds, least=1)
        template = await self._template(wanted.template, owner)
        built = await self._built(wanted.template, template, owner)
        id = new_id()
        own = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": id, "E2B_TEMPLATE_ID": built or template.ref}
        spec = SandboxSpec(
            template=wanted.template,
            env={**wanted.env, **own},
            metadata=wanted.metadata,
            lifetime_seconds=wanted.timeout_seconds,
            network=control_network.policy_for(wanted.egress, template, self._desk.engine.networks),
            user="root",
            sudo=True,
            cwd="/home/user",
            owner=owner,
            on_deadline=wanted.on_deadline,
            pause_memory=wanted.pause_memory,
            auto_resume=wanted.auto_resume,
            notes=_notes(wanted, built),
            volumes=wanted.volumes,
        )
        return self._desk.residents.of(await self._desk.engine.create(spec, id=id))

    async def _template(self, ref: str, owner: str) -> Template:
        """That of a snapshot of theirs, too."""
        try:
            return await self._desk.engine.template(ref, owner)
        except errors.TemplateNotFound as error:
            raise errors.TemplateNotFound(f"template '{ref}' not found: {error}") from None

    async def _built(self, ref: str, template: Template, owner: str) -> str | None:
        """The id of a template of the client's own, where it is one: no database is asked where it cannot be."""
        aliases = self._desk.engine.config.aliases
        if ref.partition("@")[0] == template.name or any(fnmatchcase(ref, alias) for alias in aliases):
            return None
        return await self._desk.engine.builds.id_of(ref, owner)

    def _found(self, owner: str, asked: Listing) -> list[SandboxInfo]:
        """Those that are asked for, in order, from the place on that the page before ended at."""
        found = [each for each in self._desk.engine.list(owner) if self._matches(each, asked)]
        found.sort(key=_position, reverse=asked.order == "desc")
        if asked.after is None:
            return found
        after, ascending = asked.after, asked.order == "asc"
        return [each for each in found if (_position(each) > after if ascending else _position(each) < after)]

    def _matches(self, info: SandboxInfo, asked: Listing) -> bool:
        alias = alias_of(info)
        names = (info.template, template_name(info.template), template_id(info), alias, alias.partition(":")[0])
        return (
            info.state in asked.states
            and asked.metadata.items() <= info.metadata.items()
            and (asked.started_after is None or microseconds(info.created_at) >= asked.started_after)
            and (asked.template is None or asked.template in names)
        )


def _notes(wanted: Wanted, built: str | None) -> dict[str, str]:
    return notes_of(
        alias=wanted.template,
        template=built,
        secure=wanted.secure,
        public_traffic=wanted.public_traffic,
        host_mask=wanted.host_mask,
    )


def _position(info: SandboxInfo) -> tuple[int, str]:
    return microseconds(info.created_at), info.id
