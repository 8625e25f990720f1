"""`/v1/models`: the names that a request may have as its `model`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.dialect import json_reply
from cloche.api.openai.context import OpenAiContext
from cloche.gateway.upstream import ListedModel, ModelList


class ModelRoutes:
    def __init__(self, api: OpenAiContext):
        self._api = api
        self._models = ModelList(api.gateway.upstreams)
        self.routes = [
            api.route("GET", "/v1/models", self.list),
            api.route("GET", "/v1/models/{model:path}", self.get),
        ]

    async def list(self, request: Request) -> Response:
        self._api.owner(request)
        return json_reply({"object": "list", "data": [model_object(each) for each in await self._models.all()]})

    async def get(self, request: Request) -> Response:
        self._api.owner(request)
        return json_reply(model_object(await self._models.get(request.path_params["model"])))


def model_object(model: ListedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": model.owner}
