"""AutoGen's code executor: one class for what its local, Docker, Jupyter and Azure executors do, in a sandbox.

Needs the extra `autogen`. Python blocks share a kernel, blocks of bash, sh and shell are commands beside it.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
import tempfile
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from autogen_core import CancellationToken, Component
from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult, FunctionWithRequirements
from autogen_ext.code_executors._common import build_python_functions_file, to_stub
from pydantic import BaseModel, SecretStr

from cloche.events import ProcessResult, Result, Run
from cloche.sdk.async_sandbox import AsyncSandbox

T = TypeVar("T")

DIRECTORY = "/mnt/data"  # of the sandbox: the working directory of all blocks
PYTHON = ("python", "py", "python3")
SHELLS = ("bash", "sh", "shell")
LIFETIME_SECONDS = 3600.0  # of a sandbox after its last use
INSTALL_SECONDS = 300.0
_ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FILE_NAME = re.compile(r"\s*(?:#|<!--|/\*|//)\s*filename:\s*(\S+)", re.IGNORECASE)
_FUNCTIONS_PROMPT = """You have access to the following user defined functions. They can be accessed from the module \
called `$module_name` by their function names.

For example, if there was a function called `foo` you could import it by writing `from $module_name import foo`

$functions"""


class ClocheCodeExecutorConfig(BaseModel):
    """What `dump_component` writes. A key is written only on request, as other secrets of components are."""

    url: str | None = None
    api_key: SecretStr | None = None
    template: str = "python"
    timeout: float = 60
    output_dir: str | None = None
    functions_module: str = "functions"


@dataclass
class ClocheCodeResult(CodeResult):  # type: ignore[misc]  # AutoGen's types are not followed
    """`output_files` are the pictures and pages that the code has shown, on this machine."""

    output_files: list[Path] = field(default_factory=list)


class ClocheCodeExecutor(CodeExecutor, Component[ClocheCodeExecutorConfig]):  # type: ignore[misc]  # as above
    """Runs code blocks in one sandbox, which is made at the first use, until `stop`.

    Without `url` the sandbox runs on this machine. A block that fails ends the call, with its exit code; one that
    runs longer than `timeout` seconds raises TimeoutError. Cancelling interrupts the code. Variables and files last
    from call to call; `restart` clears the variables.
    """

    component_config_schema = ClocheCodeExecutorConfig
    component_provider_override: ClassVar[str] = "cloche.autogen.ClocheCodeExecutor"

    def __init__(
        self,
        *,
        url: str | None = None,
        api_key: str | None = None,
        template: str = "python",
        timeout: float = 60,
        output_dir: Path | str | None = None,
        functions: Sequence[Any] = (),
        functions_module: str = "functions",
    ):
        if timeout < 1:
            raise ValueError("Timeout must be greater than or equal to 1.")
        if not functions_module.isidentifier():
            raise ValueError("Module name must be a valid Python identifier")
        self._url, self._api_key, self._template = url, api_key, template
        self._timeout = timeout
        self._output_dir = None if output_dir is None else Path(output_dir)
        self._functions, self._functions_module = list(functions), functions_module
        self._box: AsyncSandbox | None = None
        self._functions_loaded = False
        self._turn = asyncio.Lock()

    @property
    def timeout(self) -> float:
        return self._timeout

    @property
    def functions_module(self) -> str:
        return self._functions_module

    @property
    def output_dir(self) -> Path:
        """Where pictures and pages go: a temporary directory, unless one was given."""
        if self._output_dir is None:
            self._output_dir = Path(tempfile.mkdtemp(prefix="cloche-"))
        return self._output_dir

    def format_functions_for_prompt(self, prompt_template: str = _FUNCTIONS_PROMPT) -> str:
        """The functions as stubs, for a model."""
        stubs = "\n\n".join(map(to_stub, self._functions))
        return Template(prompt_template).substitute(module_name=self._functions_module, functions=stubs)

    # -- its life

    async def start(self) -> None:
        await self._sandbox()

    async def stop(self) -> None:
        box, self._box, self._functions_loaded = self._box, None, False
        if box is not None:
            await box.kill()

    async def restart(self) -> None:
        """Clears the variables. The files stay."""
        await (await (await self._sandbox()).contexts.get()).restart()
        self._functions_loaded = False

    async def _sandbox(self) -> AsyncSandbox:
        async with self._turn:
            if self._box is None:
                self._box = await AsyncSandbox(
                    self._template, url=self._url, api_key=self._api_key, timeout=LIFETIME_SECONDS
                )
            else:
                await self._box.renew(LIFETIME_SECONDS)
            return self._box

    # -- code

    async def execute_code_blocks(
        self, code_blocks: list[CodeBlock], cancellation_token: CancellationToken
    ) -> ClocheCodeResult:
        """Runs the blocks in order, until one fails. Raises TimeoutError, CancelledError, and ValueError for functions
        that do not load."""
        return await _run_cancellable(self._execute_blocks(code_blocks), cancellation_token)

    async def _execute_blocks(self, blocks: Sequence[CodeBlock]) -> ClocheCodeResult:
        box = await self._sandbox()
        if self._functions and not self._functions_loaded:
            await self._load_functions(box)
        outputs: list[str] = []
        files: list[Path] = []
        exit_code = 0
        for block in blocks:
            exit_code, output, made = await self._execute_block(box, block)
            outputs.append(output)
            files += made
            if exit_code:
                break
        return ClocheCodeResult(exit_code=exit_code, output="\n".join(outputs), output_files=files)

    async def _execute_block(self, box: AsyncSandbox, block: CodeBlock) -> tuple[int, str, list[Path]]:
        language = block.language.lower()
        if language not in (*PYTHON, *SHELLS):
            return 1, f"unknown language {language}", []
        named = _FILE_NAME.match(block.code.partition("\n")[0])
        if named is not None:
            path = posixpath.normpath(posixpath.join(DIRECTORY, named[1]))
            if not path.startswith(DIRECTORY + "/"):
                return 1, "Filename is not in the workspace", []
            await box.files.write(path, block.code)
        if language in PYTHON:
            return self._finish_run(await box.run(block.code, timeout=self._timeout))
        return _finish_command(await box.commands.run(block.code, cwd=DIRECTORY, timeout=self._timeout))

    def _finish_run(self, run: Run) -> tuple[int, str, list[Path]]:
        if run.outcome == "timed_out":
            raise TimeoutError(f"{run.stderr}{run.stdout}\n Timeout")
        parts, files = [run.stdout, run.stderr], []
        for result in run.results:
            files += self._save_result(result)
            parts.append(result.text or "")
        if run.error is not None:
            parts.append(_ANSI_COLOURS.sub("", str(run.error)).rstrip("\n"))
        elif not run.ok:
            parts.append(run.reason or run.outcome)
        return 0 if run.ok else 1, "\n".join(filter(None, parts)), files

    def _save_result(self, result: Result) -> list[Path]:
        """The files that a picture or page was written to."""
        made = []
        for ending, content in (("png", result.png), ("html", result.html)):
            if content is not None:
                made.append((self.output_dir / f"{uuid4().hex}.{ending}").absolute())
                made[-1].write_bytes(content.encode() if isinstance(content, str) else content)
        return made

    async def _load_functions(self, box: AsyncSandbox) -> None:
        """Writes the module of functions, with its packages. Raises ValueError."""
        needed = [each.python_packages for each in self._functions if isinstance(each, FunctionWithRequirements)]
        packages = sorted({name for names in needed for name in names})
        if packages:
            words = ["python3", "-m", "pip", "install", "-q", *packages]
            installed = await box.commands.run(words, timeout=INSTALL_SECONDS)
            if installed.exit_code:
                raise ValueError(f"Pip install failed. {installed.stdout}{installed.stderr}")
        source = build_python_functions_file(self._functions)
        await box.files.write(f"{DIRECTORY}/{self._functions_module}.py", source)
        found = f"import sys; sys.path.insert(0, {DIRECTORY!r})"
        loaded = await box.run(f"{found}\nimport {self._functions_module}", timeout=self._timeout)
        if not loaded.ok:
            raise ValueError(f"Functions failed to load: {loaded.error or loaded.reason}")
        self._functions_loaded = True

    # -- files

    async def get_file_list(self, cancellation_token: CancellationToken) -> list[str]:
        """The names of the files in the working directory."""
        files = (await self._sandbox()).files
        found = await _run_cancellable(files.list(DIRECTORY), cancellation_token)
        return [each.name for each in found if each.kind == "file"]

    async def upload_files(self, files: Sequence[Path | str], cancellation_token: CancellationToken) -> None:
        """Copies files of this machine into the working directory."""
        target = (await self._sandbox()).files
        for path in map(Path, files):
            writing = target.write(f"{DIRECTORY}/{path.name}", await asyncio.to_thread(path.read_bytes))
            await _run_cancellable(writing, cancellation_token)

    async def download_files(self, files: Sequence[Path | str], cancellation_token: CancellationToken) -> list[str]:
        """Copies files of the working directory to `output_dir`. Returns their paths there."""
        source, made = (await self._sandbox()).files, []
        for name in files:
            content = await _run_cancellable(source.read(f"{DIRECTORY}/{name}"), cancellation_token)
            made.append(self.output_dir / Path(name).name)
            await asyncio.to_thread(made[-1].write_bytes, content)
        return [str(path) for path in made]

    # -- as a component

    def _to_config(self) -> ClocheCodeExecutorConfig:
        if self._functions:
            raise NotImplementedError("functions cannot be serialised")
        return ClocheCodeExecutorConfig(
            url=self._url,
            api_key=None if self._api_key is None else SecretStr(self._api_key),
            template=self._template,
            timeout=self._timeout,
            output_dir=None if self._output_dir is None else str(self._output_dir),
            functions_module=self._functions_module,
        )

    @classmethod
    def _from_config(cls, config: ClocheCodeExecutorConfig) -> ClocheCodeExecutor:
        key = None if config.api_key is None else config.api_key.get_secret_value()
        return cls(**{**config.model_dump(exclude={"api_key"}), "api_key": key})


async def _run_cancellable(work: Awaitable[T], token: CancellationToken) -> T:
    task = asyncio.ensure_future(work)
    token.link_future(task)
    return await task


def _finish_command(ran: ProcessResult) -> tuple[int, str, list[Path]]:
    if ran.outcome == "timed_out":
        raise TimeoutError(f"{ran.stderr}{ran.stdout}\n Timeout")
    return ran.exit_code, ran.stderr + ran.stdout, []
