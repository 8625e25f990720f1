"""Where one program runs: a sandbox with its inputs in it. What it leaves there is collected after its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cloche import errors
from cloche.api.librechat import outcome, outputs
from cloche.api.librechat.identity import Caller
from cloche.api.librechat.inputs import Input
from cloche.api.librechat.outcome import Outcome
from cloche.api.librechat.outputs import Collected, Outputs
from cloche.api.librechat.replies import Json, Notes
from cloche.engine.sandboxes.sandbox import Sandbox

COLLECT_SECONDS = 120.0  # what is in a sandbox is read by its init, which its programs can keep busy


class Place:
    """`storage` is the storage session of what the program makes, `notes` what its author should know."""

    def __init__(self, sandbox: Sandbox, caller: Caller, storage: str, notes: Notes):
        self.sandbox = sandbox
        self.caller = caller
        self.storage = storage
        self.notes = notes
        self.fields: Json = {}  # what answers say of where it ran
        self.keeps_variables = False  # of Python, for the next program

    async def collect(self) -> Collected:
        """Keeps what the program left. Nothing is raised for a sandbox that did not survive it: a note says so.

        Nor for one that takes too long, by what processes do that go on in it: then it does not survive that.
        """
        try:
            async with asyncio.timeout(COLLECT_SECONDS):
                return await self._collect()
        except errors.Gone:
            self.notes.add("what the program left in /mnt/data is lost: it brought its sandbox to an end")
        except errors.SandboxPaused:
            self.notes.add("what the program left in /mnt/data is not told of: its sandbox was paused meanwhile")
        except TimeoutError:
            self.sandbox.expire()
            self.notes.add("what the program left in /mnt/data is lost: it could not be read in time")
        return self._lost()

    def answer(self, ended: Outcome, collected: Collected) -> Json:
        """The body of an answer to POST /exec."""
        said = outcome.encode(ended, self.notes)
        memory = {"memory": self.sandbox.memory_peak_bytes()}  # with its files, and of all that it did before
        return {"session_id": self.storage, **self.fields, **outputs.encode(collected), **said, **memory}

    def step_aside(self) -> None:
        """The program waits for somebody outside: who else may use the sandbox, may do so meanwhile."""

    async def step_back(self) -> None:
        """The program goes on, as soon as nobody else uses the sandbox."""

    async def _collect(self) -> Collected:
        raise NotImplementedError

    def _lost(self) -> Collected:
        raise NotImplementedError


class OwnPlace(Place):
    """A sandbox for one program."""

    def __init__(
        self,
        sandbox: Sandbox,
        caller: Caller,
        storage: str,
        notes: Notes,
        *,
        inputs: Sequence[Input],
        outputs: Outputs,
    ):
        super().__init__(sandbox, caller, storage, notes)
        self._inputs = inputs
        self._outputs = outputs

    async def _collect(self) -> Collected:
        return await self._outputs.collect(
            self.sandbox, self.caller, self.storage, self._inputs, self.notes, marks=True
        )

    def _lost(self) -> Collected:
        return Collected(inherited=tuple(self._inputs))
