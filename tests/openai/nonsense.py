"""Requests that use everything, and the same with something else somewhere in them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(["type", "id"]), inner, max_size=3)
    ),
    max_leaves=6,
)

ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "system", "content": "Be kind."},
    {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "```python\n1\n```"},
            {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"},
            {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,AA=="},
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        ],
    },
    {"role": "assistant", "content": [{"type": "output_text", "text": "hi", "annotations": [{"type": "x"}]}]},
    {"role": "user", "content": "hi"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1", "status": "completed"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
    {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "2"},
    {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "code": "1",
        "container_id": "cntr_1",
        "outputs": [{"type": "logs", "logs": "1"}, {"type": "image", "url": "u"}],
    },
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "s"}],
        "content": [{"type": "reasoning_text", "text": "t"}],
        "encrypted_content": "e",
    },
    {"type": "tool_search_output", "tools": [{"type": "mcp", "server_label": "w", "authorization": "a"}]},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "e"},
]
TOOLS: list[dict[str, Any]] = [
    {"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["file-1"], "memory_limit": "1g"}},
    {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
    {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}},
    {"type": "mcp", "server_label": "w", "server_url": "https://x.test", "authorization": "a", "headers": {"a": "b"}},
    {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "h"}]},
    {"type": "web_search", "filters": {"allowed_domains": ["x.test"]}},
    {"type": "shell", "environment": {"type": "local"}},
]
RESPONSE: dict[str, Any] = {
    "model": "cloche/echo",
    "input": ITEMS,
    "instructions": "Be brief.",
    "tools": TOOLS,
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}, {"type": "mcp", "server_label": "w"}],
    },
    "include": ["code_interpreter_call.outputs", "reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "conversation": {"id": "conv_1"},
    "stream_options": {"include_outputs": True},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}, "verbosity": "low"},
    "temperature": 1.0,
    "top_logprobs": 1,
    "max_tool_calls": 3,
    "max_output_tokens": 100,
    "prompt_cache_options": {"a": 1},
}
CHAT: dict[str, Any] = {
    "model": "cloche/echo",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "```python\n1\n```"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
                {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,AA=="}},
                {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
            ],
        },
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}],
            "refusal": "no",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "d", "type": "custom", "custom": {"name": "g", "input": "x"}},
            ],
            "code_interpreter_calls": [
                {"id": "ci_1", "code": "1", "container_id": "cntr_1", "outputs": [{"type": "logs", "logs": "1"}]}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "1"}]},
        {"role": "tool", "tool_call_id": "d", "content": "2"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "3"},
    ],
    "tools": [
        {"type": "code_interpreter", "code_interpreter": {"container": {"type": "auto", "file_ids": ["file-1"]}}},
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}},
        {
            "type": "custom",
            "custom": {"name": "g", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "d"}}},
        },
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    },
    "metadata": {"session_id": "s"},
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "reasoning_effort": "low",
    "max_completion_tokens": 100,
    "logprobs": True,
    "top_logprobs": 1,
    "modalities": ["text"],
    "n": 1,
    "stop": ["a"],
    "seed": 1,
}


@st.composite
def nonsense(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """The body, with something else, or nothing, somewhere in it."""
    changed = json.loads(json.dumps(body))
    place = changed
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        if isinstance(place[key], (dict, list)) and place[key] and draw(st.integers(0, 3)):
            place = place[key]
        elif draw(st.integers(0, 4)):
            place[key] = draw(values)
            return changed
        else:
            del place[key]
            return changed
