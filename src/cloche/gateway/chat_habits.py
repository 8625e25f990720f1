"""What the models of an upstream do not put up with, learned from what they refuse."""

from __future__ import annotations

from urllib.parse import urlsplit

from msgspec.structs import replace

from cloche import errors
from cloche.gateway.recent import Recent
from cloche.gateway.refusals import refuses
from cloche.model import Struct

LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
USAGE = "stream_options"


class Habit(Struct):
    """How one model is asked. `limit_name` is what it calls the most tokens that it may write."""

    limit_name: str
    usage_in_stream: bool = True


class Habits:
    """Of one upstream's models.

    OpenAI's newer models refuse `max_tokens`; many other servers do not know `max_completion_tokens`, nor all of them
    `stream_options`. Which it is cannot be asked, but a refusal names the field. What one client's request teaches
    holds for all of them, so it counts only after the model has answered when it was asked so.
    """

    def __init__(self, base_url: str):
        self._default = Habit(limit_name=LIMIT_NAMES[_is_openai(base_url)])
        self._known: Recent[Habit] = Recent()

    def of(self, model: str) -> Habit:
        return self._known.of(model) or self._default

    def other(self, habit: Habit, error: errors.UpstreamFailed) -> Habit | None:
        """Another way to ask, if the error hints at one. It ends: no way comes twice."""
        if habit.usage_in_stream and refuses(error, USAGE):
            return replace(habit, usage_in_stream=False)
        if habit.limit_name == self._default.limit_name and refuses(error, habit.limit_name):
            return replace(habit, limit_name=LIMIT_NAMES[1 - LIMIT_NAMES.index(habit.limit_name)])
        return None

    def answered(self, model: str, habit: Habit) -> None:
        """The model puts up with this."""
        if habit != self.of(model):
            self._known.keep(model, habit)


def _is_openai(base_url: str) -> bool:
    host = urlsplit(base_url).hostname or ""
    return host == "api.openai.com" or host.endswith((".openai.com", ".openai.azure.com"))
