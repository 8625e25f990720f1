"""`/ui/`: where one begins."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.ui.house import House, Page, Visitor


def pages(house: House) -> list[Page]:
    async def show(request: Request, visitor: Visitor) -> Response:
        own = house.engine.list(visitor.owner)
        return house.render(request, visitor, "start.html", running=sum(each.state == "running" for each in own))

    return [Page("/", show)]
