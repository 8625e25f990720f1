"""Items: the parts of a conversation with a model, as the Responses API defines them.

    {"type": "message", "role": .., "content": [..]}        {"type": "reasoning", "summary": [..], ..}
    {"type": "function_call", "call_id", "name", "arguments"}
    {"type": "function_call_output", "call_id", "output"}
    {"type": "code_interpreter_call", "code", "container_id", "outputs"}           and others that upstreams add

A *transcript* is the list of items as an upstream gets them: there, code is a call of the function `python`.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

Item = dict[str, Any]

PYTHON_FUNCTION = "python"
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
_ID_MARK = "c10c4e"  # at the beginning of every id of this server, to distinguish it from an upstream's


def new_item_id(kind: str) -> str:
    """Returns a new id of ours for an item of that type."""
    return _PREFIXES.get(kind, "item_") + _ID_MARK + secrets.token_hex(21)


def is_own_id(id: object) -> bool:
    """Whether the id was created here."""
    return isinstance(id, str) and id.partition("_")[2].startswith(_ID_MARK)


def assistant_message(text: str, annotations: list[Item] | None = None) -> Item:
    """Returns a complete message of the assistant."""
    return {
        "id": new_item_id("message"),
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [output_text_part(text, annotations)],
    }


def output_text_part(text: str = "", annotations: list[Item] | None = None) -> Item:
    return {"type": "output_text", "text": text, "annotations": annotations or [], "logprobs": []}


def without_credentials(item: Item, depth: int = 3) -> Item:
    """Removes credentials for other servers from a tool, or from an item with tools: they are never stored."""
    if item.get("type") == "mcp":
        item = {name: value for name, value in item.items() if name not in ("authorization", "headers")}
    if item.get("type") == "code_interpreter":
        item = _strip_domain_secrets(item)
    tools = item.get("tools")
    if not isinstance(tools, list):
        return item
    known = [each for each in tools if isinstance(each, dict)] if depth else []
    return {**item, "tools": [without_credentials(each, depth - 1) for each in known]}


def _strip_domain_secrets(tool: Item) -> Item:
    container = tool.get("container")
    policy = container.get("network_policy") if isinstance(container, dict) else None
    if not isinstance(container, dict) or not isinstance(policy, dict) or "domain_secrets" not in policy:
        return tool
    harmless = {name: value for name, value in policy.items() if name != "domain_secrets"}
    return {**tool, "container": {**container, "network_policy": harmless}}


def message_text(item: Item) -> str:
    """Returns the text of a message in any of its shapes; each part begins a line."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part)


# Extracts the code from a tool call's JSON arguments while they stream, in pieces of any size.
#
# Small models do not always send `{"code": ..}`. Arguments that are no JSON object are taken as the code
# itself, other names for `code` are accepted, and a fence around the code is removed.

CODE_FIELD_NAMES = ("code", "python", "input", "source", "script")

_OPENING = re.compile(r'\s*\{\s*"(' + "|".join(CODE_FIELD_NAMES) + r')"\s*:\s*"')
_MAYBE_OPENING = re.compile(r'\s*(\{\s*("[a-z]{0,6}("\s*(:\s*("?)?)?)?)?)?')  # no name is longer
_BLANKS = re.compile(r"\s+")
_SPECIAL = re.compile(r'[\\"]')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_FENCE = "```"
_FENCED_CODE = re.compile(r"\s*```(?:python|py|Python)?[ \t]*\r?\n(.*?)\r?\n?```\s*", re.DOTALL)


class CodeArgumentParser:
    """Parser of streamed arguments: `feed` returns the code that is certain so far, `whole()` all of it."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._head = ""  # the text before the code's string, each run of blanks as one
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
        code = self._hold_back_fence(self._unescape_piece(piece)) if self._begun else ""
        self._sent.append(code)
        return code

    def _hold_back_fence(self, code: str) -> str:
        """Returns the code, or nothing while it may begin a fence; if it is a fence, all of it is held back."""
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
        """Returns the whole code.

        It begins with all that `feed` returned, unless the arguments turned out otherwise.
        """
        return extract_code("".join(self._raw))

    def rest(self) -> str:
        """Returns the end of the code that `feed` has not returned yet."""
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

    def _unescape_piece(self, piece: str) -> str:
        text = self._pending + piece
        code, at = _unescape_prefix(text)
        self._over = text[at : at + 1] == '"'
        self._pending = text[at:]
        return code


def unescape_json_string(text: str) -> str:
    """Decodes the contents of a JSON string, as far as they are complete."""
    return _unescape_prefix(text)[0]


def _unescape_prefix(text: str) -> tuple[str, int]:
    """Decodes, and returns where it stopped: at the closing quote, at an incomplete escape, or at the end."""
    out, at = [], 0
    while at < len(text):
        plain = _find_special(text, at)
        out.append(text[at:plain])
        at = plain
        read = _read_escape(text, at) if text[at : at + 1] == "\\" else None
        if read is None:
            break
        letter, at = read
        out.append(letter)
    return "".join(out), at


def _find_special(text: str, at: int) -> int:
    found = _SPECIAL.search(text, at)
    return len(text) if found is None else found.start()


def _read_escape(text: str, at: int) -> tuple[str, int] | None:
    """Returns the character of the escape at that position, and its end. None if the escape is incomplete."""
    if at + 1 >= len(text):
        return None
    if text[at + 1] != "u":
        return _ESCAPES.get(text[at + 1], text[at + 1]), at + 2
    first = _read_code_unit(text, at)
    if first is None:
        return None
    if not 0xD800 <= first < 0xDC00:
        return _decode_code_unit(first), at + 6
    if not "\\u".startswith(text[at + 6 : at + 8]):
        return "\ufffd", at + 6
    second = _read_code_unit(text, at + 6)
    if second is None:
        return None
    if not 0xDC00 <= second < 0xE000:
        return "\ufffd", at + 6
    return chr(0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00)), at + 12


def _read_code_unit(text: str, at: int) -> int | None:
    digits = text[at + 2 : at + 6]
    try:
        return int(digits, 16) if len(digits) == 4 else None
    except ValueError:
        return 0xFFFD


def _decode_code_unit(unit: int) -> str:
    return "\ufffd" if 0xD800 <= unit < 0xE000 else chr(unit)


def extract_code(arguments: str) -> str:
    """Returns the code that a model meant with these arguments."""
    return _strip_fence(_replace_surrogates(_find_code(arguments)))


def _find_code(arguments: str) -> str:
    try:
        value: Any = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return _recover_cut_off_code(arguments)
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _pick_text_value(value)
    return arguments


def _pick_text_value(value: dict[str, Any]) -> str:
    for name in CODE_FIELD_NAMES:
        if isinstance(value.get(name), str):
            return str(value[name])
    texts = [each for each in value.values() if isinstance(each, str)]
    return texts[0] if len(texts) == 1 else ""


def _recover_cut_off_code(arguments: str) -> str:
    """Returns the code in arguments that are no JSON: the code of truncated arguments, else all of the text."""
    opening = _OPENING.match(arguments)
    return unescape_json_string(arguments[opening.end() :]) if opening else arguments


def _strip_fence(code: str) -> str:
    fenced = _FENCED_CODE.fullmatch(code)
    return fenced[1] if fenced else code


def _replace_surrogates(code: str) -> str:
    """Replaces lone surrogates, which cannot be encoded."""
    return code.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not code.isascii() else code
