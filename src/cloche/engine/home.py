"""What a context needs of its sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cloche.engine.admission import Turns
from cloche.engine.guest import Guest
from cloche.engine.history import Transcript
from cloche.engine.kernel import Kernel
from cloche.engine.tool_calls import Tools
from cloche.events import Ended
from cloche.model import Limits

if TYPE_CHECKING:
    from cloche.engine.context import Context


class Home(Protocol):
    """What a context needs of its sandbox."""

    limits: Limits
    tools: Tools
    transcript: Transcript
    turns: Turns

    async def start_kernel(self, context: Context) -> Kernel:
        """Raises SandboxLost or what init answers."""

    async def branch_kernel(self, origin: Kernel) -> Kernel:
        """A copy of that kernel. Raises NotCopyable, Unavailable or Gone."""

    def check_room(self, count: int) -> None:
        """Raises InvalidRequest unless it can have so many contexts more."""

    def add_contexts(self, contexts: list[Context]) -> None:
        """Raises as `check_room` and `check_running` do, with none added."""

    def oom_kills(self) -> int: ...

    def abandon(self, why: str) -> None: ...

    def execution_ended(self, ended: Ended) -> None:
        """An execution of it has ended."""

    def count_execution(self) -> None:
        """Raises QuotaExceeded if there can be no more now."""

    def check_running(self) -> None:
        """Raises Gone if the sandbox has ended."""

    @property
    def has_deadline(self) -> bool: ...

    @property
    def ending(self) -> str | None: ...

    @property
    def guest(self) -> Guest: ...
