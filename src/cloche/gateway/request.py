"""The request for a turn, decoded and checked."""

from __future__ import annotations

from typing import Any, Literal

from cloche.gateway.items import Item
from cloche.model import Struct
from cloche.network_policy import NetworkPolicy

MemoryTier = Literal["1g", "4g", "16g", "64g"]


class CodeTool(Struct):
    """The tool `code_interpreter`: where code runs. A container's id, or the options for a new container."""

    container: str | None = None  # explicit: "cntr_.."
    file_ids: tuple[str, ...] = ()
    memory: MemoryTier | None = None
    network: NetworkPolicy | None = None  # None: the request has none
    session: str | None = None  # of chats: the container of that session, made at its first use


class TurnRequest(Struct):
    """One turn. `tools` are the client's own and the upstream's own; the code interpreter is `code`."""

    model: str
    items: list[Item]  # the new input; `history` comes before it
    history: list[Item] = []  # the earlier transcript, in the form for an upstream
    instructions: str | None = None
    code: CodeTool | None = None
    known_container: str | None = None  # the one that the conversation used last
    tools: list[Item] = []
    tool_choice: Any = "auto"
    max_tool_calls: int | None = None
    max_output_tokens: int | None = None
    options: dict[str, Any] = {}  # temperature, top_p, reasoning, text, .. : for the upstream, in the Responses' words
    cite_new_files: bool = False
