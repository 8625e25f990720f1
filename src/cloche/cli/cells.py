"""Lines of input become cells, by Python's grammar alone: nothing is ever executed here."""

from __future__ import annotations

import ast
import codeop
import re
import warnings

_CONTINUES = re.compile(r"(else|elif|except|finally)\b")
_MAGIC = re.compile(r"\s*[%!?]|.*\?\s*$")


class Cells:
    """Feed it lines; it says when a cell is complete. A block ends with an empty line, or where the next one begins."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._compile = codeop.CommandCompiler()
        self._compile.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

    @property
    def pending(self) -> bool:
        """Whether a cell has begun."""
        return bool(self._lines)

    def feed(self, line: str) -> list[str]:
        """The cells that are complete with this line: none, one, or two."""
        done = []
        if self._begins_anew(line):
            done += self.end()
        if not self._lines and not line.strip():
            return done
        self._lines.append(line)
        if self._complete():
            done += self.end()
        return done

    def end(self) -> list[str]:
        """The input is over: what there is is a cell."""
        lines, self._lines = self._lines, []
        return ["\n".join(lines)] if any(line.strip() for line in lines) else []

    def clear(self) -> None:
        self._lines = []

    def _begins_anew(self, line: str) -> bool:
        """Whether `line` is not part of the block before it: code that is piped or pasted has no empty line there."""
        if not self._lines or not line.strip() or line[0].isspace() or _CONTINUES.match(line):
            return False
        return not self._cell_magic() and not self._decorator() and self._parses(self._text() + "\n")

    def _complete(self) -> bool:
        if self._cell_magic():
            return not self._lines[-1].strip()
        if len(self._lines) == 1 and _MAGIC.match(self._lines[0]):
            return True
        return self._parses(self._text())

    def _cell_magic(self) -> bool:
        return self._lines[0].startswith("%%")

    def _decorator(self) -> bool:
        return self._lines[-1].startswith("@")

    def _text(self) -> str:
        return "\n".join(self._lines)

    def _parses(self, text: str) -> bool:
        """Whether it is whole. What is wrong counts as whole: the sandbox says what is wrong with it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self._compile(text, symbol="single") is not None
            except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
                return True
