"""Two beginnings of a conversation that clients offer to people."""

from __future__ import annotations

from typing import Any

from cloche import errors

LISTED: list[dict[str, Any]] = [
    {
        "name": "analyse_file",
        "title": "Analyse a file",
        "description": "Look at a data file in the sandbox, and say what is in it.",
        "arguments": [
            {"name": "path", "description": "Below /mnt/data, or absolute.", "required": True},
            {"name": "question", "description": "What you want to know.", "required": False},
        ],
    },
    {
        "name": "work_in_sandbox",
        "title": "Work in the sandbox",
        "description": "Solve a task by writing and running code in the sandbox.",
        "arguments": [{"name": "task", "description": "What is to be done.", "required": True}],
    },
]
WORDS = {
    "analyse_file": "Analyse the file {path} in the sandbox with run_code. Look at its kind and its first rows before "
    "anything else, check for missing and odd values, then draw what is worth seeing, and say what you found. "
    "{question}",
    "work_in_sandbox": "Solve this by writing and running code in the sandbox, in small steps whose results you check: "
    "{task}",
}


def filled(name: str, given: dict[str, str] | None) -> dict[str, Any]:
    """Raises InvalidRequest that says what is missing."""
    known = {each["name"]: each for each in LISTED}
    if name not in known:
        raise errors.InvalidRequest(f"there is no prompt {name[:100]!r}; there are: {', '.join(known)}")
    values = {each["name"]: (given or {}).get(each["name"], "") for each in known[name]["arguments"]}
    for each in known[name]["arguments"]:
        if each["required"] and not values[each["name"]]:
            raise errors.InvalidRequest(f"the prompt {name} needs {each['name']}: {each['description']}")
    words = WORDS[name].format(**values).strip()
    return {
        "description": known[name]["description"],
        "messages": [{"role": "user", "content": {"type": "text", "text": words}}],
    }
