"""`/ui/health`: whether the server is well, and how full it is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.ui.house import House, Page, Visitor


def pages(house: House) -> list[Page]:
    async def show(request: Request, visitor: Visitor) -> Response:
        return house.render(request, visitor, "health.html", verdict=house.health.verdict)

    return [Page("/health", show)]
