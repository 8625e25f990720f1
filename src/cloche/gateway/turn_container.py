"""The container of a turn: found, or made at the first code call, with the files of the request."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator
from urllib.parse import unquote

from cloche import errors
from cloche.config import Config
from cloche.engine.executions.context import Context
from cloche.events import AnyEvent, Ended
from cloche.gateway.attachments import AttachedFile, Attachments
from cloche.gateway.container_files import DATA_DIRECTORY, ContainerFiles, find_regular_file
from cloche.gateway.containers import (
    CONTAINER_ID_PREFIX,
    Container,
    ContainerOptions,
    Containers,
    describe_network,
    find_free_name,
    to_sandbox_id,
    unwrap_container_id,
)
from cloche.gateway.items import Item
from cloche.gateway.outputs import ExecutionOutputs, Picture
from cloche.gateway.request import CodeTool, TurnRequest
from cloche.gateway.trace import RequestTrace
from cloche.model import FileInfo, Usage
from cloche.network_policy import NetworkPolicy
from cloche.store.files import StoredContainerFile, StoredFiles
from cloche.telemetry import log

RESET_NOTE = (
    "The container of this conversation has expired and was replaced: variables, and files that are not listed, are "
    "lost. Load and define them again as needed."
)
MAX_NOTED_FILES = 100  # files that are reported to the model


class TurnContainer:
    """The container of one turn of one owner.

    Call `prepare` before the first model call, `enter` at the first code.
    """

    def __init__(
        self,
        containers: Containers,
        files: ContainerFiles,
        stored: StoredFiles,
        config: Config,
        owner: str,
        request: TurnRequest,
        trace: RequestTrace,
    ):
        assert request.code is not None
        self._containers = containers
        self._files = files
        self._stored = stored
        self._config = config
        self._owner = owner
        self._request = request
        self._code: CodeTool = request.code
        self._trace = trace
        self._container: Container | None = None
        self._previous: str | None = None  # the sandbox of the container that is replaced
        self._attachments = Attachments()
        self._paths: dict[str, str] = {}  # of attachments, by their origin; theirs before they are there
        self._sizes: dict[str, int] = {}  # of the files reported to the model, by path
        self._told = False
        self._moved: list[str] = []  # files at another path than the one reported to the model
        self._entered = False
        self._network = NetworkPolicy()  # of the code
        self.reset = False  # whether the conversation's container was replaced, since it had expired

    async def prepare(self) -> None:
        """Finds the named container, or the conversation's, and puts the request's files there; makes none.

        Files of the history are put there too, if no code ran yet. Raises SandboxNotFound or Gone if the named
        container cannot be used, FileNotFound for files that do not exist, InvalidRequest for unreadable files,
        InvalidContainerOption.
        """
        await self._containers.limits_of(self._code.memory)
        if self._code.network is not None:
            self._containers.check_network(self._code.network)
        request = self._request
        await self._attachments.take(self._stored, self._owner, self._code.file_ids, request.items, request.history)
        self._container = await self._find_container()
        if self._container is not None:
            await self._place_attachments(self._container)
        else:
            await self._plan_paths()
        self._network = await self._wanted_network() or await self._containers.default_network()

    def shown(self, items: list[Item]) -> list[Item]:
        """Returns history and items for the model, with notes in place of files."""
        return self._attachments.shown(items, self._paths)

    def notes(self) -> list[str]:
        """Returns notes for the model: reachable hosts, available files, and whether state was lost."""
        listed = [f"{path} ({size} bytes)" for path, size in list(self._sizes.items())[:MAX_NOTED_FILES]]
        notes = [
            describe_network(self._network, packages=self._config.packages.enabled),
            *([RESET_NOTE] if self.reset else []),
        ]
        return [*notes, f"Files that are there: {', '.join(listed)}."] if listed else notes

    def preface_output(self, output: str | list[Item]) -> str | list[Item]:
        """Returns the result of an execution.

        The first one after a replacement begins with a note on it, or on moved files.
        """
        notes = [*self._moved] if self._told or not self.reset else [RESET_NOTE, *self._moved]
        if not notes:
            return output
        self._told, self._moved = True, []
        note = "".join(f"[{each}]\n" for each in notes)
        return note + output if isinstance(output, str) else [{"type": "input_text", "text": note}, *output]

    async def enter(self) -> str:
        """Returns the container's id; makes the container if there is none, or if it has ended in this turn.

        Raises the errors of `Engine.create`, and Gone if a named container has ended.
        """
        if self._container is not None and self._container.paused:
            self._container = await self._containers.get(self._owner, self._container.id)
        elif self._container is not None and self._container.ended:
            self._release_ended(self._container)
        elif self._container is not None:
            self._container.touch()  # the model takes its time to write the code
        if self._container is None:
            with self._trace.step("container", how="replaced" if self.reset else "created") as step:
                self._container, is_new = await self._make_container()
                step.fields["container"] = self._container.id
                await (self._furnish_new(self._container) if is_new else self._join_existing(self._container))
        elif not self._entered:
            with self._trace.step("container", how="reused", container=self._container.id):
                pass
        self._entered = True
        return self._container.id

    async def run(self, code: str) -> AsyncGenerator[AnyEvent, None]:
        """Yields the events of an execution. A caller that stops early interrupts it.

        Raises Gone if a named container has ended; another is replaced at the next code.
        """
        container = self._container
        assert container is not None
        async with contextlib.AsyncExitStack() as stack:
            try:
                container.touch(self._config.gateway.execution_seconds)
                await stack.enter_async_context(self._containers.with_network(container, self._code.network))
                container.sandbox.check_running()
                context = container.sandbox.context()
            except (errors.Gone, errors.SandboxPaused) as error:
                if self._code.container is not None:
                    raise
                became = "was paused" if isinstance(error, errors.SandboxPaused) else "has ended"
                yield Ended(outcome="died", usage=Usage(), reason=f"the container {became}")
                return
            async with contextlib.aclosing(self._stream_execution(container, context, code)) as events:
                async for event in events:
                    yield event

    async def _stream_execution(
        self, container: Container, context: Context, code: str
    ) -> AsyncGenerator[AnyEvent, None]:
        seconds = self._config.gateway.execution_seconds
        try:
            async with context.execute(code, timeout_seconds=seconds) as execution:
                while events := await execution.next_events():
                    for event in events:
                        yield event
        finally:  # code that was interrupted has changed files, too
            self._files.refresh_kept(container)
            with contextlib.suppress(errors.Gone, errors.SandboxPaused):
                container.touch()

    async def cite_link(self, path: str) -> Item | None:
        """Returns a citation of a linked file, without its place in the text; None if there is no such file."""
        file = await self._find_linked_file(path)
        return None if file is None else _file_citation(file)

    async def cite_picture(self, picture: Picture) -> Item | None:
        """Makes a shown picture a file of the container and returns its citation. None if there is no room."""
        assert self._container is not None
        file = await self._files.show(self._container, picture)
        return None if file is None else _file_citation(file)

    async def _find_linked_file(self, path: str) -> StoredContainerFile | None:
        if self._container is None:
            return None if self._previous is None else await self._files.cite_kept(self._owner, self._previous, path)
        try:
            return await self._files.cite(self._container, path)
        except (errors.Gone, errors.SandboxPaused):
            return await self._files.cite_kept(self._owner, self._container.sandbox.id, path)

    # -- finding and making

    async def _find_container(self) -> Container | None:
        if self._code.container is not None:
            return await self._containers.get(self._owner, self._code.container)
        if self._code.session is not None:
            return await self._find_by_session(self._code.session)
        known = self._request.known_container
        return None if known is None else await self._find_if_alive(known)

    async def _find_by_session(self, session: str) -> Container | None:
        alive = await self._containers.find_live_in_session(self._owner, session)
        last = await self._containers.find_expired_in_session(self._owner, session) if alive is None else None
        if last is not None:
            self._mark_replaced(to_sandbox_id(last))
        return alive

    async def _find_if_alive(self, id: str) -> Container | None:
        try:
            return await self._containers.get(self._owner, id)
        except (errors.Gone, errors.SandboxNotFound):
            self._mark_replaced(unwrap_container_id(id).removeprefix(CONTAINER_ID_PREFIX))
            return None

    def _release_ended(self, container: Container) -> None:
        """Releases a container that has ended during the turn."""
        if self._code.container is not None:
            container.sandbox.check_running()
        self._container = None
        self._mark_replaced(container.sandbox.id)

    def _mark_replaced(self, sandbox: str) -> None:
        self._previous, self.reset, self._told = sandbox, True, False

    async def _make_container(self) -> tuple[Container, bool]:
        """Returns the container, and whether it is new: two requests may begin a session at once."""
        network = await self._wanted_network()
        wishes = ContainerOptions(memory=self._code.memory, network=network, session=self._code.session)
        if wishes.session is not None:
            return await self._containers.of_session(self._owner, wishes)
        return await self._containers.create(self._owner, wishes), True

    async def _wanted_network(self) -> NetworkPolicy | None:
        """Returns the requested policy, else that of the container or of the one that is replaced.

        None without any.
        """
        if self._code.network is not None:
            return self._code.network
        if self._container is not None:
            return self._container.sandbox.network.policy
        return await self._containers.remembered_network(self._owner, self._previous) if self._previous else None

    # -- files

    async def _plan_paths(self) -> None:
        """Plans the paths in a container that does not exist yet: first restored files, then new ones."""
        kept = [] if self._previous is None else await self._files.list_kept(self._owner, self._previous)
        restored = [file for file in kept if not file.shown]
        self._sizes = {file.path: file.bytes for file in restored}
        self._paths = {file.made_from: file.path for file in restored if file.made_from is not None}
        for origin, attachment in self._attachments.all.items():
            if origin not in self._paths:
                self._paths[origin] = DATA_DIRECTORY + find_free_name(
                    attachment.name, {each[len(DATA_DIRECTORY) :] for each in self._sizes}
                )
            self._sizes.setdefault(self._paths[origin], attachment.size_bytes)

    async def _furnish_new(self, container: Container) -> None:
        """Puts the files of the previous container and of the request into a new container."""
        told_of = (*self._sizes, *self._paths.values())
        with self._files.claim(container, told_of):  # before anything is waited for: others may find it now
            restored = [] if self._previous is None else await self._files.restore(self._previous, container)
            there = {file.made_from for file in restored}
            for origin, attachment in self._attachments.all.items():
                if origin not in there and origin in self._paths:  # without a path: it did not fit before
                    await self._place_file(container, self._paths[origin], origin, attachment)

    async def _join_existing(self, container: Container) -> None:
        """Uses a container that a concurrent request made; the model is told of paths that changed."""
        told, self._sizes = self._paths, {}
        await self._place_attachments(container)
        moved = [path for origin, path in self._paths.items() if told.get(origin, path) != path]
        self._moved = [f"Your files are at {', '.join(moved)}."] if moved else []

    async def _place_attachments(self, container: Container) -> None:
        """Puts the request's files into an existing container, unless it has them."""
        attachments = self._attachments.all
        if not attachments:
            return
        rows = await self._files.list_registered(container)
        self._paths = {row.made_from: row.path for row in rows if row.made_from is not None}
        for origin, attachment in attachments.items():
            if not await self._has_attachment(container, origin):
                async with self._files.reserve_path(container, attachment.name) as path:
                    if await self._place_file(container, path, origin, attachment):
                        self._paths[origin] = path
            if origin in self._attachments.found:
                self._sizes[self._paths[origin]] = attachment.size_bytes

    async def _has_attachment(self, container: Container, origin: str) -> bool:
        """Whether the container has the file. A file of the history that code removed is not put there again."""
        path = self._paths.get(origin)
        if path is None or origin in self._attachments.earlier:
            return path is not None
        return await find_regular_file(container.sandbox, path) is not None

    async def _place_file(self, container: Container, path: str, origin: str, attachment: AttachedFile) -> bool:
        """Writes a file.

        Raises the errors of writing for the request's files; False for one of the history that is gone.
        """
        try:
            await self._files.place(container, path, attachment)
        except (errors.FileError, errors.NotFound) as error:
            if origin not in self._attachments.earlier:
                raise
            log.warning("file.not_placed", container=container.id, reason=error.code)
            return False
        return True


def _file_citation(file: StoredContainerFile) -> Item:
    return {
        "type": "container_file_citation",
        "container_id": CONTAINER_ID_PREFIX + file.sandbox,
        "file_id": file.id,
        "filename": file.name,
        "start_index": 0,
        "end_index": 0,
    }


# Citations of a container's files: files that a message links, and pictures that code has shown.

MAX_CITATIONS = 100
MAX_LINK_CANDIDATES = 4  # of one link: names can contain blanks and brackets, and so can the text after them
MAX_LINK_LENGTH = 1024

_LINK_START = re.compile(r"sandbox:(?=/mnt/data/)")
_PLAIN_LINK = re.compile(r"[^)\s\"'<>\]`|]+")
_SENTENCE_END = ".,;:!?*_"


class Citations:
    def __init__(self, workplace: TurnContainer | None, *, every_file: bool):
        self._workplace = workplace
        self._every_file = every_file
        self._pictures: list[Picture] = []
        self._files: dict[str, FileInfo] = {}

    def saw(self, sight: ExecutionOutputs) -> None:
        """Records the outputs of an execution."""
        self._pictures += sight.pictures
        self._files |= sight.files

    async def of(self, part: Item, *, final: bool) -> list[Item]:
        """Returns the annotations of one part of a message. Pictures and new files belong to the last message."""
        if self._workplace is None or part.get("type") != "output_text":
            return []
        links = await self._cite_links(part["text"])
        if not final:
            return links
        shown = [await self._workplace.cite_picture(each) for each in self._pictures[:MAX_CITATIONS]]
        self._pictures = []
        return [*filter(None, shown), *links, *await self._cite_unlinked_files(links)]

    async def _cite_links(self, text: str) -> list[Item]:
        found = []
        for start in list(_LINK_START.finditer(text))[:MAX_CITATIONS]:
            citation = await self._cite_link(text, start.start(), start.end())
            if citation is not None:
                found.append(citation)
        return found

    async def _cite_link(self, text: str, start: int, path_start: int) -> Item | None:
        """Returns the citation of the first candidate of a link that names a file."""
        assert self._workplace is not None
        for end in candidate_link_ends(text, start, path_start):
            path = text[path_start:end]
            for each in dict.fromkeys((path, unquote(path))):
                citation = await self._workplace.cite_link(each)
                if citation is not None:
                    return {**citation, "start_index": start, "end_index": end}
        return None

    async def _cite_unlinked_files(self, links: list[Item]) -> list[Item]:
        if not self._every_file:
            return []
        assert self._workplace is not None
        linked = {each["file_id"] for each in links}
        cited = [await self._workplace.cite_link(path) for path in list(self._files)[:MAX_CITATIONS]]
        return [each for each in cited if each is not None and each["file_id"] not in linked]


def candidate_link_ends(text: str, start: int, path_start: int) -> list[int]:
    """Returns the possible ends of a link that starts there, the likeliest first.

    In `[a](sandbox:/mnt/data/x (1).csv)` that is the last bracket of the line which closes one of its own, as
    Markdown parses it; in `<sandbox:..>` the angle; elsewhere the first blank, without the full stop of a
    sentence.
    """
    line = text[path_start : path_start + MAX_LINK_LENGTH].partition("\n")[0]
    ends = []
    if text[max(start - 1, 0) : start] == "<":
        ends = [line.find(">")]
    elif text[max(start - 2, 0) : start] == "](":
        ends = [at for at, each in enumerate(line) if each == ")" and _has_balanced_brackets(line[:at])][
            :MAX_LINK_CANDIDATES
        ]
    plain = _PLAIN_LINK.match(line)
    if plain is not None:
        ends += [plain.end(), len(plain[0].rstrip(_SENTENCE_END))]
    return [path_start + end for end in dict.fromkeys(ends) if end > 0]


def _has_balanced_brackets(text: str) -> bool:
    return text.count("(") == text.count(")")
