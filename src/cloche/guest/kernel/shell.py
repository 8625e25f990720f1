"""IPython's shell for a kernel: no files, no threads, no history database, and a short way through a cell.

`run(code)` works as `InteractiveShell.run_cell` does for a user (magics, `!cmd`, `?`, top-level await, last
expression, `In` and `Out`), without the parts that are invisible here. It raises the program's exception.
"""

from __future__ import annotations
import __future__

import ast
import asyncio
import io
import json
import linecache
import os
import re
import signal
import subprocess
import sys
import tokenize
import typing
from inspect import CO_COROUTINE
from types import SimpleNamespace
from typing import Any

from IPython.core.autocall import ExitAutocall, IPyAutocall
from IPython.core.compilerop import CachingCompiler
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.macro import Macro
from IPython.core.profiledir import ProfileDir
from traitlets import Type, observe
from traitlets.config import Config

from cloche.guest.kernel import display, tracebacks
from cloche.guest.kernel.channel import Interrupts
from cloche.guest.kernel.installed import InstalledPackages

# Shell commands in a cell: `!cmd`.

SHELL_PATH = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


def run_command(command: str) -> int:
    """Runs a shell command with the cell's output; its exit status, negative for a signal. An interrupt ends it."""
    direct = all(_is_our_stream(stream, fd) for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if direct:
        process = subprocess.Popen([SHELL_PATH, "-c", command], stdin=subprocess.DEVNULL)
        return _wait_or_end(process, process.wait)
    process = subprocess.Popen(
        [SHELL_PATH, "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return _wait_or_end(process, lambda: _copy_output(process))


def _is_our_stream(stream: Any, fd: int) -> bool:
    """False where the program has redirected it: `%%capture`, `redirect_stdout`."""
    try:
        return stream.fileno() == fd
    except (AttributeError, OSError, ValueError):
        return False


def _copy_output(process: Any) -> int:
    for line in process.stdout:
        sys.stdout.write(line.decode("utf-8", "replace"))
    process.stdout.close()
    return process.wait()


def _wait_or_end(process: Any, wait: Any) -> int:
    try:
        return wait()
    except BaseException:
        _end_process(process)
        raise


def _end_process(process: Any) -> None:
    """As a terminal would: interrupt, then insist."""
    for number, seconds in ((signal.SIGINT, 0.25), (signal.SIGTERM, 0.25), (signal.SIGKILL, None)):
        process.send_signal(number)
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue


# Programs in LibreChat's style: `await` and `return` outside of functions, and a few names preset.
#
# LibreChat's models are told that their program is put into an async function. Here it is a module as any
# other, so that its lines and names are its own; only one that returns outside of functions really becomes a
# function.

MAIN_FUNCTION = "__user_main__"  # what LibreChat's own server calls the function
_WANTS_LOOP = re.compile(r"create_task\(|ensure_future\(|get_running_loop\(")
_RUNS_LOOP = ("asyncio.run(", "run_until_complete(", "run_forever(", ".Runner(")
_PRESET_TYPES = ("Any", "Dict", "List", "Optional", "Union")
PRESET_NAMES = dict(
    asyncio=asyncio, json=json, os=os, sys=sys, **{name: getattr(typing, name) for name in _PRESET_TYPES}
)
"""What such a program has without importing it."""


def compile_program(source: bytes, path: str) -> Any:
    """Code that is a coroutine's if the program awaits anything. Raises SyntaxError, and ValueError for NUL bytes."""
    try:
        return _compile_source(source, path)
    except SyntaxError as error:
        if error.msg != "'return' outside function":
            raise
        return _compile_source(_wrap_in_function(ast.parse(source, path)), path)


def needs_event_loop(source: str) -> bool:
    """Whether a program that does not await anything itself has to run inside of a loop nevertheless."""
    return _WANTS_LOOP.search(source) is not None and not any(word in source for word in _RUNS_LOOP)


async def run_in_loop(code: Any, names: dict) -> None:
    """Runs the code, then the tasks that it has begun, since no other code waits for them.

    Raises a task's exception.
    """
    exec(code, names)
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled():
                task.result()


def _compile_source(source: Any, path: str) -> Any:
    return compile(source, path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def _wrap_in_function(program: ast.Module) -> ast.Module:
    """The same lines in a function, and a call of it."""
    wrapping = ast.parse(f"async def {MAIN_FUNCTION}(): pass\nawait {MAIN_FUNCTION}()")
    wrapping.body[0].body = program.body  # type: ignore[attr-defined]
    return wrapping


KEPT_CELLS = 4096  # sources of cells, for tracebacks, `In` and inspect.getsource

_FIRST_WORD = re.compile(r"[^\W\d]\w*")
_INPUT = re.compile(r"_i\d+")
_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class CellCompiler(CachingCompiler):
    """Names cells as the user sees them in a traceback."""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        name, again = f"{tracebacks.CELL_PREFIX}{number}]", 0
        wanted = transformed_code.rstrip("\n")
        while name in linecache.cache and "".join(linecache.getlines(name)).rstrip("\n") != wanted:
            again += 1
            name = f"{tracebacks.CELL_PREFIX}{number}.{again}]"
        return name


class Exit(ExitAutocall):
    """`exit`, `exit()`, `exit(3)`: ends the cell, not the kernel."""

    def __call__(self, code: Any = None) -> None:
        raise SystemExit(code)


class UncreatedProfileDir(ProfileDir):
    """A profile directory that is named but never made: the home may be read-only."""

    @observe("location")
    def _location_changed(self, change: Any) -> None:
        pass

    def check_dirs(self) -> None:
        pass


class Shell(InteractiveShell):
    compiler_class = Type(CellCompiler)
    # Plain where IPython has traits and a property, which every cell reads: to set a trait takes ten functions.
    execution_count: int = 1
    user_ns: Any = None
    history_manager: Any = None
    display_formatter: Any = None
    input_transformer_manager: Any = None
    input_transformers_post: Any = None
    ast_transformers: Any = None
    displayhook_class = Type(display.CellDisplayHook)
    display_pub_class = Type(display.CellPublisher)

    def __init__(self, **kwargs: Any):
        # Plain attributes, no traits: they are read in every cell.
        self.screen: Any = None
        self.interrupts = Interrupts()
        self.installed = InstalledPackages()
        self.silenced = False
        self.final = False  # nothing of the program follows the value that is being shown
        self._failed: BaseException | None = None  # raised in what the cell ran by `%run`, `%%capture` or `run_cell`
        self.loop: Any = None
        self.input_transformer_manager = TransformerManager()
        self.input_transformers_post = []
        self.ast_transformers = []
        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.colors = "nocolor"
        config.InteractiveShell.separate_in = ""
        super().__init__(config=config, **kwargs)
        # `exit` and `get_ipython` are builtins for as long as the process lives, not for one cell.
        self.builtin_trap.auto_builtins.update(exit=self.exiter, quit=self.exiter)
        self.builtin_trap.__enter__()
        self.display_trap.__enter__()
        self._line_transforms = len(self.input_transformer_manager.line_transforms)

    # What IPython would put on disk or start

    def init_ipython_dir(self, ipython_dir: Any) -> None:
        self.set_trait("ipython_dir", os.path.join(os.path.expanduser("~"), ".ipython"))

    @observe("ipython_dir")
    def _ipython_dir_changed(self, change: Any) -> None:
        pass

    def init_events(self) -> None:
        super().init_events()
        self.events.unregister("pre_execute", self._clear_warning_registry)  # `run` does it, without the detour

    def init_profile_dir(self, profile_dir: Any) -> None:
        self.profile_dir = UncreatedProfileDir(location=os.path.join(self.ipython_dir, "profile_default"))

    def init_virtualenv(self) -> None:
        pass

    def init_completer(self) -> None:
        self.Completer = None

    def load_completer(self) -> Any:
        """IPython's completer, made when first needed. It does not use Jedi, whose import takes tens of megabytes."""
        if self.Completer is None:
            known = sys.modules.get("jedi")
            if known is None:
                sys.modules["jedi"] = None  # type: ignore[assignment]
            try:
                super().init_completer()
            finally:
                if known is None:
                    sys.modules.pop("jedi", None)
            self.Completer.use_jedi = False  # type: ignore[attr-defined]
        return self.Completer

    def init_display_formatter(self) -> None:
        self.display_formatter = display.CellFormatter(parent=self)
        self.configurables.append(self.display_formatter)

    def _exiter_default(self) -> Exit:
        return Exit(self)

    # One cell

    def run(self, code: str) -> None:
        """Runs one cell. Raises its exception; shows its last expression on `screen`."""
        count = self.execution_count
        if type(count) is not int:  # the program has set it, and there is no trait to refuse that
            count = len(self.history_manager.input_hist_raw)
        self.execution_count = count + 1
        sys.displayhook = self.displayhook
        self._failed = None
        info = SimpleNamespace(raw_cell=code, store_history=True, silent=False, shell_futures=True, cell_id=None)
        self.user_ns.pop("__warningregistry__", None)  # else a warning of an equal line is told once for all cells
        callbacks = self.events.callbacks
        if callbacks["pre_execute"] or callbacks["pre_run_cell"]:
            self.events.trigger("pre_execute")
            self.events.trigger("pre_run_cell", info)
        try:
            pieces = self._compile_cell(code, count)
            for piece in pieces:
                self._execute_code(piece, code, last=piece is pieces[-1])
            if self._failed is not None:
                raise self._failed
        finally:
            if callbacks["post_execute"] or callbacks["post_run_cell"]:
                self.events.trigger("post_execute")
                self.events.trigger("post_run_cell", SimpleNamespace(info=info, execution_count=count))

    def forget_cells(self) -> None:
        """Resets the shell as if no cell had run, as far as a program can see."""
        self.execution_count = 1
        history = self.history_manager
        history.input_hist_parsed[:] = history.input_hist_raw[:] = [""]
        for name in [name for name in self.user_ns if _INPUT.fullmatch(name)]:
            del self.user_ns[name]
        self.displayhook.flush()
        self.user_ns.update({"_i": "", "_ii": "", "_iii": ""})
        for name in [name for name in linecache.cache if name.startswith(tracebacks.CELL_PREFIX)]:
            del linecache.cache[name]

    def _compile_cell(self, code: str, count: int) -> list:
        """Code objects for a cell, its name known to linecache."""
        name = f"{tracebacks.CELL_PREFIX}{count}]"
        plain = self._is_plain(code)
        self.silenced = ends_in_semicolon(code)
        expression = self._compile_expression(code, name) if plain else None
        if expression is not None:
            self._record_cell(count, name, code, code)
            return [expression]
        tree = self._parse_cell(code, name, count, plain)
        if self.ast_transformers:
            tree = self.transform_ast(tree)
        return [self._compile_node(node, name, mode) for node, mode in self._split_nodes(tree.body)]

    def _compile_expression(self, code: str, name: str) -> Any:
        """The code of a cell that is one line with one expression: the commonest, and the cheapest to compile. The
        trees of the general way dirty some hundred pages of a fresh fork."""
        if (
            "\n" in code
            or "=" in code
            or self.silenced
            or self.ast_transformers
            or self.ast_node_interactivity == "none"
        ):
            return None
        try:
            return compile(code, name, "eval", self.compile.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
        except (SyntaxError, ValueError):
            return None

    def _parse_cell(self, code: str, name: str, count: int, plain: bool) -> ast.Module:
        """The tree of a cell. Code that is valid Python is taken as it is, with its line numbers."""
        if plain:
            try:
                tree = self._parse_source(code, name)
                self._record_cell(count, name, code, code)
                return tree
            except (SyntaxError, ValueError):
                pass
        source = self._transform_source(code)
        self._record_cell(count, name, source, code)
        return self._parse_source(source, name)

    def _parse_source(self, source: str, name: str) -> ast.Module:
        return compile(source, name, "exec", self.compile.flags | ast.PyCF_ONLY_AST, True)

    def _is_plain(self, code: str) -> bool:
        """Whether valid Python in `code` can only mean Python. IPython gives another meaning to a pasted prompt, and
        to one line that starts with the name of a magic (`ls`), a macro or `exit`."""
        transforms = self.input_transformer_manager.line_transforms
        if code.startswith("In [") or self.input_transformers_post or len(transforms) != self._line_transforms:
            return False
        if "\n" in code.strip():
            return True
        match = _FIRST_WORD.match(code)
        if match is None:
            return True
        word = match.group()
        if isinstance(self.user_ns.get(word), (Macro, IPyAutocall)):
            return False
        return word not in self.magics_manager.magics["line"] or word in self.user_ns

    def _transform_source(self, code: str) -> str:
        """IPython's syntax turned into Python, line numbers kept. Code that it cannot read stays as it is."""
        blank = len(code) - len(code.lstrip("\n"))
        try:
            return "\n" * blank + self.transform_cell(code)
        except (SyntaxError, ValueError, tokenize.TokenError):
            return code

    def _split_nodes(self, body: list) -> list:
        """(node, mode) to compile: one module for all statements that show nothing, the others for shown values."""
        interactivity = self.ast_node_interactivity
        if interactivity == "all":
            return [_shown_node(node) for node in body]
        last: list = []
        if interactivity == "last_expr_or_assign":
            last = _assigned_name(body)
        if (
            not last
            and body
            and interactivity != "none"
            and (isinstance(body[-1], ast.Expr) or interactivity == "last")
        ):
            last, body = body[-1:], body[:-1]
        nodes: list = [(ast.Module(body, []), "exec")] if body else []
        return nodes + [_shown_node(node) for node in last]

    def _compile_node(self, node: Any, name: str, mode: str) -> Any:
        compiler = self.compile
        code = compile(node, name, mode, compiler.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
        compiler.flags |= code.co_flags & _FUTURES  # `from __future__` holds for later cells too
        return code

    def _record_cell(self, count: int, name: str, source: str, raw: str) -> None:
        """Fills `In`, `_i`, `_iN` and linecache, which keep the last KEPT_CELLS cells."""
        linecache.cache[name] = (len(source), None, [line + "\n" for line in source.split("\n")], name)
        history, ns = self.history_manager, self.user_ns
        cells = history.input_hist_raw
        history.input_hist_parsed.append(source)
        cells.append(raw)
        ns["_iii"], ns["_ii"], ns["_i"] = ns.get("_ii", ""), ns.get("_i", ""), cells[-2]
        ns[f"_i{count}"] = raw
        old = count - KEPT_CELLS
        if old > 0:
            linecache.cache.pop(f"{tracebacks.CELL_PREFIX}{old}]", None)
            ns.pop(f"_i{old}", None)
            history.input_hist_parsed[old] = cells[old] = ""

    def _execute_code(self, code: Any, source: str, *, last: bool) -> None:
        if code.co_flags & CO_COROUTINE:
            self._run_in_loop(self._await_code(code, last))
        elif needs_event_loop(source):
            # A notebook's loop is running while a cell does: there, a task can be made without an await.
            self._run_in_loop(self._call_code(code, last))
        else:
            self._show_value(eval(code, self.user_ns), last)

    async def _await_code(self, code: Any, last: bool) -> None:
        self._show_value(await eval(code, self.user_ns), last)

    async def _call_code(self, code: Any, last: bool) -> None:
        self._show_value(eval(code, self.user_ns), last)

    def _show_value(self, value: Any, last: bool) -> None:
        """Shows the value of an expression; statements have none."""
        if value is not None:
            self.final = last
            try:
                sys.displayhook(value)
            finally:
                self.final = False

    def _run_in_loop(self, coroutine: Any) -> None:
        loop = self.live_loop()
        task = loop.create_task(coroutine, name="cell")  # those without a name are counted: see `interpreter`
        self.interrupts.watch(task)
        try:
            _complete_task(loop, task)
        except asyncio.CancelledError:
            if self.interrupts.cancelled:
                raise KeyboardInterrupt from None
            raise
        finally:
            self.interrupts.watch(None)
            if not task.done():
                task.cancel()

    def live_loop(self) -> Any:
        """The loop of all cells, made when first needed."""
        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        return self.loop

    # What IPython would write to a terminal

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Handles an exception that IPython caught: of code that the cell ran, of a repr, or for `%tb`.

        The cell raises the first kind itself later.
        """
        if exc_tuple is None and sys.exc_info()[1] is not None:
            self._failed = self._failed or sys.exc_info()[1]
            return
        try:
            _kind, value, _tb = self._get_exc_info(exc_tuple)
        except ValueError:
            print("No traceback available to show.", file=sys.stderr)
            return
        print(tracebacks.render_traceback(value), end="", file=sys.stderr)

    def showsyntaxerror(self, filename: Any = None, running_compiled_code: bool = False) -> None:
        self.showtraceback()

    def system(self, cmd: str) -> None:
        """`!cmd`"""
        self.user_ns["_exit_code"] = run_command(self.var_expand(cmd, depth=1))
        self.installed.look()
        if hint := self.installed.hint():
            print(hint, file=sys.stderr)

    system_piped = system_raw = system


def _complete_task(loop: Any, task: Any) -> None:
    """Runs the loop until `task` is done, even if the program, now or earlier, stopped the loop meanwhile."""
    while True:
        try:
            return loop.run_until_complete(task)
        except RuntimeError:
            if task.done() or loop.is_closed() or loop.is_running():
                raise


def _shown_node(node: Any) -> tuple:
    return (ast.Expression(node.value), "eval") if isinstance(node, ast.Expr) else (ast.Interactive([node]), "single")


def _assigned_name(body: list) -> list:
    """An expression of the name that the last statement assigned, if it did."""
    last = body[-1] if body else None
    targets = getattr(last, "targets", None) or [getattr(last, "target", None)]
    if not isinstance(last, (ast.Assign, ast.AugAssign, ast.AnnAssign)) or len(targets) != 1:
        return []
    if not isinstance(targets[0], ast.Name):
        return []
    node = ast.Expr(ast.Name(targets[0].id, ast.Load()))
    return [ast.fix_missing_locations(ast.copy_location(node, last))]


def ends_in_semicolon(source: str) -> bool:
    """Whether the last token is `;`, which silences the last expression."""
    tail = source.rstrip()
    line = tail[tail.rfind("\n") + 1 :]
    if ";" not in line:
        return False
    if "#" not in line:
        return line.endswith(";")
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(tail).readline))
    except (SyntaxError, tokenize.TokenError):
        return False
    skipped = (tokenize.ENDMARKER, tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.DEDENT)
    last = next((token for token in reversed(tokens) if token.type not in skipped), None)
    return last is not None and last.string == ";"
