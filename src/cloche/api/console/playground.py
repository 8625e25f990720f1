"""The playground: a notebook on a live sandbox, and the frame that shows the output of programs.

The frame is an opaque origin without network. All that it needs comes to it by postMessage, libraries too: so
its policy names no address at all, and nothing that runs in it can make a request. WebRTC ignores such
policies: where a browser supports it, `Connection-Allowlist` stops that, too.
"""

from __future__ import annotations

import asyncio
import functools

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.console.context import ConsoleContext, ConsolePage, ConsoleVisitor
from cloche.api.console.statics import STATIC_DIRECTORY
from cloche.languages import LANGUAGE_NAMES
from cloche.templates import Catalogue

PANELS = (("files", "Files"), ("variables", "Variables"), ("terminal", "Terminal"), ("chat", "Chat"))
FRAME_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; media-src data: blob:; font-src data:; worker-src blob:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
)
_FRAME_HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Output</title><style>{style}</style></head>'
)
_FRAME_BODY = '<body><main id="shown"></main><script>{script}</script></body></html>'
_ID_CHARACTERS = 64
_LIFE_SECONDS = 1800.0  # of a sandbox that is not used any more


class PlaygroundPages:
    def __init__(self, context: ConsoleContext):
        self._context = context
        self._catalogue = Catalogue(context.config.data_dir, context.config.aliases)

    async def page(self, request: Request, visitor: ConsoleVisitor) -> Response:
        found = await asyncio.to_thread(self._catalogue.list)
        names = sorted({each.name for each in found}, key=lambda name: (name != "python", name)) or ["python"]
        return self._context.render(
            request,
            visitor,
            "playground.html",
            sandbox=request.query_params.get("sandbox", "")[:_ID_CHARACTERS],
            templates=names,
            languages=list(LANGUAGE_NAMES),
            panels=PANELS,
            modules=_script_modules(),
            seconds=min(_LIFE_SECONDS, self._context.config.lifetime.max_seconds),
        )

    async def frame(self, request: Request, visitor: ConsoleVisitor) -> Response:
        headers = {
            "content-security-policy": FRAME_POLICY,
            "connection-allowlist": "()",
            "x-frame-options": "SAMEORIGIN",
        }
        return Response(await asyncio.to_thread(_frame_html), media_type="text/html", headers=headers)


@functools.cache
def _script_modules() -> list[str]:
    """The modules that the page's script imports, so that the browser requests all of them at once."""
    return ["panel-parts.js", *sorted(path.name for path in STATIC_DIRECTORY.glob("playground-*.js"))]


@functools.cache
def _frame_html() -> str:
    """The frame's page, equal for all visitors. Script and style are inline: an opaque origin may load nothing."""
    style = (STATIC_DIRECTORY / "frame.css").read_text()
    script = (STATIC_DIRECTORY / "frame.js").read_text()
    return _FRAME_HEAD.format(style=style) + _FRAME_BODY.format(script=script)


def pages(context: ConsoleContext) -> list[ConsolePage]:
    playground = PlaygroundPages(context)
    return [ConsolePage("/playground", playground.page), ConsolePage("/frame", playground.frame)]
