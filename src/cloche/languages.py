"""The table of languages that kernels speak: the only list of them on the host.

A new language is a row here, a kernel in `guest/languages/`, and its start in `guest/languages/languages.py`, whose
names a test compares with these. `tools/generate_tables.py` writes the console's copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from cloche.structs import Struct

LanguageName = Literal["python", "javascript", "typescript", "bash", "r", "java"]


class Language(Struct):
    """One language, as people and their tools name it."""

    title: str
    fences: tuple[str, ...]  # other names of it behind a fence in Markdown
    extensions: tuple[str, ...]  # of its files; the first one is a notebook's
    kernel_name: str  # as Jupyter's kernels are named
    kernel_title: str
    codemirror_mode: str
    mime: str
    indent: str = "  "
    comment: str = "#"
    colours: str | None = None  # the language with the colours for the console's editor; None: its own


LANGUAGES: dict[str, Language] = {
    "python": Language(
        title="Python",
        fences=("py", "python3"),
        extensions=("py",),
        kernel_name="python3",
        kernel_title="Python 3",
        codemirror_mode="python",
        mime="text/x-python",
        indent="    ",
    ),
    "javascript": Language(
        title="JavaScript",
        fences=("js",),
        extensions=("js", "mjs"),
        kernel_name="javascript",
        kernel_title="JavaScript (Node.js)",
        codemirror_mode="javascript",
        mime="text/javascript",
        comment="//",
    ),
    "typescript": Language(
        title="TypeScript",
        fences=("ts",),
        extensions=("ts",),
        kernel_name="typescript",
        kernel_title="TypeScript",
        codemirror_mode="typescript",
        mime="text/typescript",
        comment="//",
        colours="javascript",
    ),
    "bash": Language(
        title="bash",
        fences=("sh", "shell"),
        extensions=("sh",),
        kernel_name="bash",
        kernel_title="Bash",
        codemirror_mode="shell",
        mime="text/x-sh",
    ),
    "r": Language(
        title="R",
        fences=(),
        extensions=("R", "r"),
        kernel_name="ir",
        kernel_title="R",
        codemirror_mode="r",
        mime="text/x-r",
    ),
    "java": Language(
        title="Java",
        fences=("jshell",),
        extensions=("java", "jsh"),
        kernel_name="java",
        kernel_title="Java",
        codemirror_mode="text/x-java",
        mime="text/x-java",
        indent="    ",
        comment="//",
    ),
}
LANGUAGE_NAMES: tuple[LanguageName, ...] = get_args(LanguageName)


def list_titles(names: Sequence[str] = LANGUAGE_NAMES) -> str:
    """The titles in a sentence: "Python, JavaScript, TypeScript or bash"."""
    titles = [LANGUAGES[name].title for name in names]
    return f"{', '.join(titles[:-1])} or {titles[-1]}"
