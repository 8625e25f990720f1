"""Events of an execution as Jupyter's messages. Pure."""

from __future__ import annotations

from typing import Any

from cloche.api.encoding import to_json_value
from cloche.events import AnyEvent, Bundle, Cleared, Display, Ended, Output, Raised, Truncated

OWN_MIMES = ("application/vnd.cloche.data+json", "application/vnd.cloche.chart+json")  # no notebook shows them

Content = dict[str, Any]


class OutputEncoder:
    """Encodes the events of one execution. `error` is what its reply says if it failed."""

    def __init__(self) -> None:
        self.count = 0
        self.error: Content | None = None

    def encode(self, event: AnyEvent) -> tuple[str, Content] | None:
        """The type and content of a message for the channel of outputs; None for an event without one."""
        match event:
            case Output():
                return "stream", {"name": event.stream, "text": event.text}
            case Display():
                return self._encode_display(event)
            case Cleared():
                return "clear_output", {"wait": event.wait}
            case Truncated():
                text = f"[cloche] {event.dropped_bytes} bytes of {event.stream} were dropped: it is over the limit\n"
                return "stream", {"name": "stderr", "text": text}
            case Raised():
                self.error = error_content(event.name, event.value, event.traceback)
                return "error", self.error
            case Ended():
                return self._encode_end(event)
        return None

    def _encode_display(self, event: Display) -> tuple[str, Content] | None:
        data = encode_bundle(event.data)
        if not data:
            return None
        transient = {} if event.id is None else {"display_id": event.id}
        if event.main:
            return "execute_result", {"execution_count": self.count, "data": data, "metadata": {}}
        kind = "update_display_data" if event.update else "display_data"
        return kind, {"data": data, "metadata": {}, "transient": transient}

    def _encode_end(self, event: Ended) -> tuple[str, Content] | None:
        """An execution that was stopped without an exception gets an error of its own."""
        if event.outcome == "ok" or self.error is not None:
            return None
        name = "KeyboardInterrupt" if event.outcome == "interrupted" else event.outcome
        reason = event.reason or name
        self.error = error_content(name, reason, reason)
        return "error", self.error


def encode_bundle(data: Bundle) -> Content:
    """A display by MIME type: bytes in base64."""
    return {mime: to_json_value(value) for mime, value in data.items() if mime not in OWN_MIMES}


def error_content(name: str, value: str, traceback: str) -> Content:
    return {"ename": name, "evalue": value, "traceback": traceback.rstrip("\n").split("\n")}


def execute_reply(count: int, error: Content | None) -> Content:
    if error is not None:
        return {"status": "error", "execution_count": count, **error, "user_expressions": {}, "payload": []}
    return {"status": "ok", "execution_count": count, "user_expressions": {}, "payload": []}


def aborted_reply(count: int) -> Content:
    """For an execution that does not run, because one before it failed."""
    return {"status": "aborted", "execution_count": count, "user_expressions": {}, "payload": []}
