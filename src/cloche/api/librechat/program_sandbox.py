"""A sandbox with a program's inputs in it. The files that the program leaves are collected at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cloche import errors
from cloche.api.dialect import Json
from cloche.api.librechat import outcome, outputs
from cloche.api.librechat.identity import LibreChatCaller
from cloche.api.librechat.inputs import ProgramInput
from cloche.api.librechat.outcome import ProgramOutcome
from cloche.api.librechat.outputs import CollectedOutputs, ProgramOutputs
from cloche.api.librechat.replies import ProgramNotes
from cloche.engine.sandboxes.sandbox import Sandbox

COLLECT_SECONDS = 120.0  # what is in a sandbox is read by its init, which its programs can keep busy


class ProgramSandbox:
    """`storage` is the storage session of the program's outputs; `notes` are for the program's author."""

    def __init__(self, sandbox: Sandbox, caller: LibreChatCaller, storage: str, notes: ProgramNotes):
        self.sandbox = sandbox
        self.caller = caller
        self.storage = storage
        self.notes = notes
        self.fields: Json = {}  # what answers say of where it ran
        self.keeps_variables = False  # of Python, for the next program

    async def collect(self) -> CollectedOutputs:
        """Stores the files that the program left. A note, not an exception, reports a sandbox that has ended.

        A sandbox that answers too slowly, because of its processes, is ended.
        """
        try:
            async with asyncio.timeout(COLLECT_SECONDS):
                return await self._collect_outputs()
        except errors.Gone:
            self.notes.add("what the program left in /mnt/data is lost: it brought its sandbox to an end")
        except errors.SandboxPaused:
            self.notes.add("what the program left in /mnt/data is not told of: its sandbox was paused meanwhile")
        except TimeoutError:
            self.sandbox.expire_now()
            self.notes.add("what the program left in /mnt/data is lost: it could not be read in time")
        return self._lost_outputs()

    def answer(self, ended: ProgramOutcome, collected: CollectedOutputs) -> Json:
        """The body of an answer to POST /exec."""
        said = outcome.encode_outcome(ended, self.notes)
        memory = {"memory": self.sandbox.memory_peak_bytes()}  # with its files, and of all that it did before
        return {"session_id": self.storage, **self.fields, **outputs.encode_files(collected), **said, **memory}

    def release_turn(self) -> None:
        """Releases the sandbox to other programs while this program waits for its client."""

    async def reacquire_turn(self) -> None:
        """Waits until no other program uses the sandbox; then this program goes on."""

    async def _collect_outputs(self) -> CollectedOutputs:
        raise NotImplementedError

    def _lost_outputs(self) -> CollectedOutputs:
        raise NotImplementedError


class SingleProgramSandbox(ProgramSandbox):
    """A sandbox for one program only."""

    def __init__(
        self,
        sandbox: Sandbox,
        caller: LibreChatCaller,
        storage: str,
        notes: ProgramNotes,
        *,
        inputs: Sequence[ProgramInput],
        outputs: ProgramOutputs,
    ):
        super().__init__(sandbox, caller, storage, notes)
        self._inputs = inputs
        self._outputs = outputs

    async def _collect_outputs(self) -> CollectedOutputs:
        return await self._outputs.collect(
            self.sandbox, self.caller, self.storage, self._inputs, self.notes, marks=True
        )

    def _lost_outputs(self) -> CollectedOutputs:
        return CollectedOutputs(inherited=tuple(self._inputs))
