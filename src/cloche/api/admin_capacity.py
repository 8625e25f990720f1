"""`/admin/capacity`: how much this server takes on at once, and how much of it is in use. For admins."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche.api.auth import Gatekeeper
from cloche.api.http import Dialect, Edge
from cloche.api.system import json_reply
from cloche.engine.engine import Engine
from cloche.engine.quotas.occupancy import CapacityInfo, MemoryLeft, Pools


class AdminCapacity:
    def __init__(self, dialect: Dialect, engine: Engine, gatekeeper: Gatekeeper):
        self._engine = engine
        self._gatekeeper = gatekeeper
        self.routes = [Route("/admin/capacity", Edge(dialect, self.show), methods=["GET"])]

    async def show(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        return json_reply(capacity_of(self._engine))


def capacity_of(engine: Engine) -> CapacityInfo:
    admission = engine.housing.admission
    memory = admission.memory
    return CapacityInfo(
        sandboxes=admission.sandboxes.occupancy,
        executions=admission.executions.occupancy,
        running=engine.running,
        paused=engine.paused,
        pool=Pools(ready=engine.waiting, wanted=engine.housing.wanted),
        memory=MemoryLeft(
            left_bytes=memory.left_bytes,
            reserve_bytes=memory.reserve_bytes,
            enough=memory.enough(),
            ample=memory.ample(),
        ),
    )
