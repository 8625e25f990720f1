"""Completion, documentation and history, also while a cell runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.jupyter.conftest import Channels, JupyterClient, contents


@pytest.fixture(params=["idle", "busy", "asking"])
def asked(client: JupyterClient, kernel: str, request: pytest.FixtureRequest) -> Iterator[Channels]:
    """A client of a kernel that waits for a cell, runs one, or waits in one for input."""
    with client.channels(kernel) as channels:
        channels.ask("kernel_info_request", {})
        channels.execute("class Thing:\n    'About things.'\n    colour = 1\nthing = Thing()\nnumber = 41")
        if request.param == "busy":
            channels.until(channels.send("execute_request", {"code": "print(1)\nwhile True: pass"}), "stream")
        if request.param == "asking":
            id = channels.send("execute_request", {"code": "input('> ')", "allow_stdin": True})
            channels.until(id, "input_request")
        yield channels


def complete(channels: Channels, code: str) -> dict[str, Any]:
    return channels.ask("complete_request", {"code": code, "cursor_pos": len(code)})


def test_code_is_completed(asked: Channels):
    found = complete(asked, "print(thing.co")
    assert (found["status"], found["cursor_start"], found["cursor_end"]) == ("ok", 12, 14)
    assert "colour" in found["matches"]
    assert complete(asked, "numb")["matches"] == ["number"]
    assert "%%timeit" in complete(asked, "%%time")["matches"]


def test_a_name_is_described(asked: Channels):
    found = asked.ask("inspect_request", {"code": "thing", "cursor_pos": 5, "detail_level": 0})
    assert found["found"] is True
    assert "About things." in found["data"]["text/plain"]
    assert asked.ask("inspect_request", {"code": "nothing", "cursor_pos": 3, "detail_level": 0})["found"] is False


def test_code_is_checked_for_its_end(asked: Channels):
    assert asked.ask("is_complete_request", {"code": "x = 1"}) == {"status": "complete"}
    assert asked.ask("is_complete_request", {"code": "if x:"}) == {"status": "incomplete", "indent": "    "}
    assert asked.ask("is_complete_request", {"code": "x = = 1"}) == {"status": "invalid"}


def test_history_is_told(asked: Channels):
    tail = asked.ask("history_request", {"hist_access_type": "tail", "n": 100, "output": False, "raw": True})
    assert tail["history"][0][2].startswith("class Thing")
    found = {"hist_access_type": "search", "pattern": "class*", "n": 1, "output": True, "raw": True}
    assert asked.ask("history_request", found)["history"][0][2] == [tail["history"][0][2], None]
    ranged = {"hist_access_type": "range", "session": 0, "start": 1, "stop": 2, "output": False, "raw": True}
    assert asked.ask("history_request", ranged)["history"] == tail["history"][:1]


def test_a_busy_kernel_is_shown_as_busy_after_an_answer(client: JupyterClient, kernel: str):
    with client.channels(kernel) as channels:
        running = channels.send("execute_request", {"code": "print(1)\nwhile True: pass"})
        channels.until(running, "stream")
        channels.ask("kernel_info_request", {})
        assert channels.until(running, "status")[-1]["content"] == {"execution_state": "busy"}


def test_other_languages_answer_that_they_do_not_know(client: JupyterClient):
    with client.channels(client.start(name="bash")) as channels:
        assert complete(channels, "ec")["matches"] == []
        assert channels.ask("is_complete_request", {"code": "echo"}) == {"status": "unknown"}


def test_code_that_breaks_its_completion_harms_nothing(client: JupyterClient, kernel: str):
    with client.channels(kernel) as channels:
        channels.execute("class Bad:\n    def __dir__(self): raise SystemExit\n    __getattr__ = None\nbad = Bad()")
        assert complete(channels, "bad.x")["matches"] == []
        channels.execute("import sys; sys.modules['IPython.core.completer'] = None; del globals()['bad']")
        assert complete(channels, "prin")["status"] in ("ok", "error")
        assert contents(channels.execute("1"), "execute_reply")[0]["status"] == "ok"
