"""Programs in the manner of LibreChat's: with await, and return, outside of functions, and a few names already there.

LibreChat's models are told that their program is put into an async function. Here it is a module as any other, so that
its lines and names are its own; only one that returns outside of functions really becomes a function.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sys
import typing
from typing import Any

MAIN = "__user_main__"  # what LibreChat's own server calls the function
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


def _compiled(source: Any, path: str) -> Any:
    return compile(source, path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def _as_function(program: ast.Module) -> ast.Module:
    """The same lines in a function, and a call of it."""
    wrapping = ast.parse(f"async def {MAIN}(): pass\nawait {MAIN}()")
    wrapping.body[0].body = program.body  # type: ignore[attr-defined]
    return wrapping
