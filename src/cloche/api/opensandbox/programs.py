"""Contexts of languages without a kernel: each run is a whole program, and nothing is kept between two of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from cloche import errors
from cloche.api.opensandbox.stream import encode_exit_frame, encode_frame, encode_init_frame, error_fields
from cloche.api.programs import SYSTEM_PATH, ProgramLanguage, ProgramLimits, language_of, running_program
from cloche.engine.commands.jobs import CapturedStream, OutputCapture
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.languages import LANGUAGES
from cloche.model import MIB, Stream, new_id

MAX_PROGRAM_CONTEXTS = 64
PROBE_SECONDS = 20.0
_OUTPUT_BYTES = 1 * MIB  # of each stream that a program's run returns
_STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")


class ProgramContext:
    def __init__(self, language: str, program: ProgramLanguage):
        self.id = new_id("c")
        self.language = language  # as the client names it
        self._program = program
        self._running: set[OutputCapture] = set()

    def interrupt(self) -> None:
        """Ends the programs that run."""
        for program in self._running:
            program.kill()

    async def stream_frames(self, sandbox: Sandbox, code: str) -> AsyncGenerator[bytes, None]:
        """The response frames: the output comes at the end. Closing the generator kills the program."""
        bounds = ProgramLimits(seconds=sandbox.limits.execution_seconds, output_bytes=_OUTPUT_BYTES)
        yield encode_init_frame(self.id)
        try:
            async with running_program(sandbox, self._program, code, (), bounds) as program:
                self._running.add(program)
                try:
                    exited = await program.wait()
                finally:
                    self._running.discard(program)
                for stream in _STREAMS:
                    if text := _text_of(program.output_so_far(stream)):
                        yield encode_frame({"type": stream, "text": text})
                yield encode_exit_frame(exited, program.usage.cpu_seconds)
        except errors.ClocheError as error:  # the headers are out, so it is said here
            yield encode_frame(error_fields(type(error).__name__, str(error)))


async def open_program_context(sandbox: Sandbox, name: str, known: int) -> ProgramContext | None:
    """A context of a language that has no kernel here; None for one that has, or that nothing is known of.

    Raises InvalidRequest if the sandbox has no compiler for it, or too many of these contexts.
    """
    language = None if name in LANGUAGES else language_of(name)
    if language is None:
        return None
    if known >= MAX_PROGRAM_CONTEXTS:
        raise errors.InvalidRequest(f"a sandbox can have {MAX_PROGRAM_CONTEXTS} contexts of programs: remove one first")
    found = await sandbox.commands.run(
        ("/bin/bash", "-c", 'type -P "$@"', "bash", *language.needs),
        env={"PATH": SYSTEM_PATH},
        timeout_seconds=PROBE_SECONDS,
    )
    if language.needs and not found.stdout:
        raise errors.InvalidRequest(f"{language.title} needs one of {', '.join(language.needs)} in the template")
    return ProgramContext(name, language)


def _text_of(kept: CapturedStream) -> str:
    dropped = f"\n[cloche] {kept.dropped_bytes} bytes dropped\n".encode() if kept.dropped_bytes else b""
    return (kept.head + dropped + kept.tail).decode("utf-8", "replace")
