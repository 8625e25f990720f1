"""What all handlers of this dialect need."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloche.api.auth import Gatekeeper
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.gateway.gateway import Gateway
from cloche.model import Struct


class Door(Struct):
    """`owner_of` says whose request it is, or raises Unauthenticated."""

    engine: Engine
    gateway: Gateway
    gatekeeper: Gatekeeper
    config: Config

    def owner_of(self, request: Request) -> str:
        return self.gatekeeper.admit(request).owner


def json_reply(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
