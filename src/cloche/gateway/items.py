"""Items: what a conversation with a model is made of, in the words of the Responses API.

    {"type": "message", "role": .., "content": [..]}        {"type": "reasoning", "summary": [..], ..}
    {"type": "function_call", "call_id", "name", "arguments"}      {"type": "function_call_output", "call_id", "output"}
    {"type": "code_interpreter_call", "code", "container_id", "outputs"}                   and whatever upstreams add

A *transcript* is the list of items as an upstream is shown them: there, code is a call of the function `python`.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

Item = dict[str, Any]

PYTHON = "python"
"""The function that a model sees instead of the code interpreter. Models are trained on this name."""

_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "call": "call_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "code_interpreter_call": "ci_",
    "custom_tool_call": "ctc_",
    "web_search_call": "ws_",
    "file_search_call": "fs_",
    "image_generation_call": "ig_",
    "mcp_call": "mcp_",
    "mcp_list_tools": "mcpl_",
    "computer_call": "cu_",
    "compaction": "cmp_",
    "local_shell_call": "lsh_",
    "shell_call": "sh_",
    "shell_call_output": "sho_",
    "apply_patch_call": "apc_",
}
_MARK = "c10c4e"  # at the beginning of every id of ours, by which they are told from an upstream's


def new_item_id(kind: str) -> str:
    """An id of ours for an item of that type."""
    return _PREFIXES.get(kind, "item_") + _MARK + secrets.token_hex(21)


def is_ours(id: object) -> bool:
    """Whether an item has its id from here."""
    return isinstance(id, str) and id.partition("_")[2].startswith(_MARK)


def message(text: str, annotations: list[Item] | None = None) -> Item:
    """What the assistant said, whole."""
    return {
        "id": new_item_id("message"),
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [output_text(text, annotations)],
    }


def output_text(text: str = "", annotations: list[Item] | None = None) -> Item:
    return {"type": "output_text", "text": text, "annotations": annotations or [], "logprobs": []}


def without_credentials(item: Item, depth: int = 3) -> Item:
    """A tool, or an item that brings tools along, without what lets a model's server into others: that is not kept."""
    if item.get("type") == "mcp":
        item = {name: value for name, value in item.items() if name not in ("authorization", "headers")}
    if item.get("type") == "code_interpreter":
        item = _without_secrets(item)
    tools = item.get("tools")
    if not isinstance(tools, list):
        return item
    known = [each for each in tools if isinstance(each, dict)] if depth else []
    return {**item, "tools": [without_credentials(each, depth - 1) for each in known]}


def _without_secrets(tool: Item) -> Item:
    container = tool.get("container")
    policy = container.get("network_policy") if isinstance(container, dict) else None
    if not isinstance(container, dict) or not isinstance(policy, dict) or "domain_secrets" not in policy:
        return tool
    harmless = {name: value for name, value in policy.items() if name != "domain_secrets"}
    return {**tool, "container": {**container, "network_policy": harmless}}


def text_of(item: Item) -> str:
    """The text of a message, whichever of its shapes it has; each part begins a line."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part)


# The code in a call's arguments, while they still come: `{"code": "import os\n...` in pieces of any size.
#
# Small models do not always send that. What is no JSON object is taken as the code itself, other names for `code` are
# understood, and a fence around the code is taken off.

NAMES = ("code", "python", "input", "source", "script")

_OPENING = re.compile(r'\s*\{\s*"(' + "|".join(NAMES) + r')"\s*:\s*"')
_MAYBE_OPENING = re.compile(r'\s*(\{\s*("[a-z]{0,6}("\s*(:\s*("?)?)?)?)?)?')  # no name is longer
_BLANKS = re.compile(r"\s+")
_SPECIAL = re.compile(r'[\\"]')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_FENCE = "```"
_FENCED = re.compile(r"\s*```(?:python|py|Python)?[ \t]*\r?\n(.*?)\r?\n?```\s*", re.DOTALL)


class CodeInArguments:
    """Feed it the pieces; it gives back code as far as it is certain. `whole()` is the code at the end."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._head = ""  # what came before the code's string began, each run of blanks as one
        self._pending = ""  # an escape that is not whole
        self._held: list[str] = []  # code that may be a fence
        self._start = ""  # the first letters of the code that are not blank, as many as a fence has
        self._begun = self._over = self._speaks = False
        self._sent: list[str] = []

    def feed(self, piece: str) -> str:
        self._raw.append(piece)
        if self._over:
            return ""
        if not self._begun:
            piece = self._find_opening(piece)
        code = self._unfenced_yet(self._unescape(piece)) if self._begun else ""
        self._sent.append(code)
        return code

    def _unfenced_yet(self, code: str) -> str:
        """The same, unless it may be a fence that begins: then it is held back, and all of it if it is one."""
        if self._speaks or self._start == _FENCE:
            return code if self._speaks else ""
        self._held.append(code)
        self._start = (self._start + code).lstrip()[: len(_FENCE)]
        if _FENCE.startswith(self._start):
            return ""
        self._speaks = True
        held, self._held = self._held, []
        return "".join(held)

    def whole(self) -> str:
        """The code. It begins with all that `feed` gave, unless what came was not what it seemed."""
        return code_of("".join(self._raw))

    def rest(self) -> str:
        """What `feed` has not given yet of the whole."""
        whole, sent = self.whole(), "".join(self._sent)
        return whole[len(sent) :] if whole.startswith(sent) else ""

    def _find_opening(self, piece: str) -> str:
        self._head += piece
        opening = _OPENING.match(self._head)
        if opening:
            self._begun = True
            return self._head[opening.end() :]
        self._over = _MAYBE_OPENING.fullmatch(self._head) is None  # raw code, or something odd: wait for the end
        self._head = "" if self._over else _BLANKS.sub(" ", self._head)  # so that it stays short
        return ""

    def _unescape(self, piece: str) -> str:
        text = self._pending + piece
        code, at = _unescape(text)
        self._over = text[at : at + 1] == '"'
        self._pending = text[at:]
        return code


def unescaped(text: str) -> str:
    """What a JSON string means, as far as it goes."""
    return _unescape(text)[0]


def _unescape(text: str) -> tuple[str, int]:
    """And where it stopped: at the closing quote, at an escape that is not whole, or at the end."""
    out, at = [], 0
    while at < len(text):
        plain = _plain_until(text, at)
        out.append(text[at:plain])
        at = plain
        read = _escape(text, at) if text[at : at + 1] == "\\" else None
        if read is None:
            break
        letter, at = read
        out.append(letter)
    return "".join(out), at


def _plain_until(text: str, at: int) -> int:
    found = _SPECIAL.search(text, at)
    return len(text) if found is None else found.start()


def _escape(text: str, at: int) -> tuple[str, int] | None:
    """The character that an escape at that place means, and where it ends. None if it is not whole."""
    if at + 1 >= len(text):
        return None
    if text[at + 1] != "u":
        return _ESCAPES.get(text[at + 1], text[at + 1]), at + 2
    first = _unit(text, at)
    if first is None:
        return None
    if not 0xD800 <= first < 0xDC00:
        return _character(first), at + 6
    if not "\\u".startswith(text[at + 6 : at + 8]):
        return "\ufffd", at + 6
    second = _unit(text, at + 6)
    if second is None:
        return None
    if not 0xDC00 <= second < 0xE000:
        return "\ufffd", at + 6
    return chr(0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00)), at + 12


def _unit(text: str, at: int) -> int | None:
    digits = text[at + 2 : at + 6]
    try:
        return int(digits, 16) if len(digits) == 4 else None
    except ValueError:
        return 0xFFFD


def _character(unit: int) -> str:
    return "\ufffd" if 0xD800 <= unit < 0xE000 else chr(unit)


def code_of(arguments: str) -> str:
    """The code that a model meant with these arguments."""
    return _unfenced(_sayable(_named_code(arguments)))


def _named_code(arguments: str) -> str:
    try:
        value: Any = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return _cut_off_code(arguments)
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _only_text(value)
    return arguments


def _only_text(value: dict[str, Any]) -> str:
    for name in NAMES:
        if isinstance(value.get(name), str):
            return str(value[name])
    texts = [each for each in value.values() if isinstance(each, str)]
    return texts[0] if len(texts) == 1 else ""


def _cut_off_code(arguments: str) -> str:
    """Of arguments that are no JSON: the code in them if they merely break off, else all of it."""
    opening = _OPENING.match(arguments)
    return unescaped(arguments[opening.end() :]) if opening else arguments


def _unfenced(code: str) -> str:
    fenced = _FENCED.fullmatch(code)
    return fenced[1] if fenced else code


def _sayable(code: str) -> str:
    """Halves of surrogates cannot be sent anywhere."""
    return code.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not code.isascii() else code
