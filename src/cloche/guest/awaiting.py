"""Programs in the manner of LibreChat's: with await, and return, outside of functions, and a few names already there.

LibreChat's models are told that their program is put into an async function. Here it is a module as any other, so that
its lines and names are its own; only one that returns outside of functions really becomes a function.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import sys
import typing
from typing import Any

MAIN = "__user_main__"  # what LibreChat's own server calls the function
_WANTS_LOOP = re.compile(r"create_task\(|ensure_future\(|get_running_loop\(")
_RUNS_LOOP = ("asyncio.run(", "run_until_complete(", "run_forever(", ".Runner(")
_TYPES = ("Any", "Dict", "List", "Optional", "Union")
KNOWN = dict(asyncio=asyncio, json=json, os=os, sys=sys, **{name: getattr(typing, name) for name in _TYPES})
"""What such a program has without importing it."""


def compiled(source: bytes, path: str) -> Any:
    """Code that is a coroutine's if the program awaits anything. Raises SyntaxError, and ValueError for NUL bytes."""
    try:
        return _compiled(source, path)
    except SyntaxError as error:
        if error.msg != "'return' outside function":
            raise
        return _compiled(_as_function(ast.parse(source, path)), path)


def wants_loop(source: str) -> bool:
    """Whether a program that does not await anything itself has to run inside of a loop nevertheless."""
    return _WANTS_LOOP.search(source) is not None and not any(word in source for word in _RUNS_LOOP)


async def in_loop(code: Any, names: dict) -> None:
    """Runs it, and then the tasks that it has begun: nobody else waits for them. Raises what one of them raises."""
    exec(code, names)
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled():
                task.result()


def _compiled(source: Any, path: str) -> Any:
    return compile(source, path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def _as_function(program: ast.Module) -> ast.Module:
    """The same lines in a function, and a call of it."""
    wrapping = ast.parse(f"async def {MAIN}(): pass\nawait {MAIN}()")
    wrapping.body[0].body = program.body  # type: ignore[attr-defined]
    return wrapping
