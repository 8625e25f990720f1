"""Random scripts for the scripted upstream, and what a client must then see: for property tests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from tests.openai.upstream import (
    BreakOff,
    Code,
    Function,
    Garbage,
    HttpError,
    IncompleteLength,
    Interleaved,
    NoFinish,
    Reasoning,
    Refusal,
    StreamError,
    Text,
    Usage,
)
from tests.openai.upstream_parts import flat, has, usage_of

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
FILE = "/mnt/data/out.csv"
TOOLS = [
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False},
]
OUTPUTS = ["code_interpreter_call.outputs"]

CODES = [
    "",
    "1 + 1",
    "print('one')",
    "print('é🎉', 'zwei', sep='\\n')\n'last'",
    "import sys; print('careful', file=sys.stderr)",
    "print('before'); 1 / 0",
    "def (",
    "raise SystemExit(3)",
    "import os; os._exit(1)",
    "print('x' * 200_000)",
    "print('\\0 \\x1b[31mred\\x1b[0m')",
    f"import base64; from IPython.display import Image, display; display(Image(data=base64.b64decode('{PNG}')))",
    f"open('{FILE}', 'w').write('a,b\\n1,2\\n')",
    "from IPython.display import clear_output; print('gone'); clear_output(); print('stays')",
]
TEXTS = [
    "",
    "Yes.",
    'Ünïcödé 🎉 and \\backslashes\\ and "quotes".',
    "One line.\n\nAnother.\n",
    f"Here: [out.csv](sandbox:{FILE}), and [none](sandbox:/mnt/data/none.txt).",
    "data: [DONE]\n\nevent: response.completed\n\n",
]

texts = st.builds(Text, st.sampled_from(TEXTS))
reasonings = st.builds(Reasoning, st.sampled_from(["", "Hmm."]), summary=st.sampled_from(["", "Thought."]))
said = st.lists(st.one_of(texts, reasonings, st.builds(Refusal, st.just("I cannot."))), max_size=2)
codes = st.builds(Code, st.sampled_from(CODES)) | st.just(Code("", raw_arguments="print('raw')"))
functions = st.builds(
    Function,
    st.just("weather"),
    st.sampled_from([{}, {"city": "Zürich"}]),
    call_id=st.uuids().map(lambda id: f"call_{id.hex}"),
)
usages = st.builds(Usage, input=st.integers(0, 50), output=st.integers(0, 50), cached=st.integers(0, 9))


def _interleaved(parts: list[Any]) -> list[Any]:
    """At once, if that can be told apart: in Chat all text of a leg is one text."""
    spoken = [isinstance(part, Reasoning) for part in parts if isinstance(part, (Text, Reasoning, Refusal))]
    return [Interleaved(*parts)] if len(parts) > 1 and len(set(spoken)) == len(spoken) else parts


def _leg(*groups: st.SearchStrategy[list[Any]]) -> st.SearchStrategy[list[Any]]:
    parts = st.tuples(*groups).map(lambda lists: [part for each in lists for part in each])
    ordered = parts | parts.map(_interleaved)
    return st.tuples(ordered, usages).map(lambda leg: [*leg[0], leg[1]])


code_legs = _leg(said, st.lists(codes, min_size=1, max_size=3))
mixed_legs = _leg(said, st.lists(codes, max_size=2), st.lists(functions, min_size=1, max_size=2))
last_legs = _leg(said, st.lists(texts, min_size=1, max_size=1))
cut_off_legs = st.tuples(last_legs | code_legs, st.just(IncompleteLength())).map(lambda leg: [*leg[0], leg[1]])
failures = st.sampled_from(
    [StreamError("overloaded"), BreakOff(), Garbage(), NoFinish(), HttpError(500, {"error": {"message": "broken"}})]
)
failing_legs = st.tuples(last_legs | code_legs, failures).map(lambda leg: [*leg[0], leg[1]])


@dataclass
class Script:
    legs: list[list[Any]]

    @property
    def status(self) -> str:
        last = self.legs[-1]
        if any(has(last, kind) for kind in (StreamError, BreakOff, Garbage, NoFinish, HttpError)):
            return "failed"
        return "incomplete" if has(last, IncompleteLength) else "completed"

    @property
    def parts(self) -> list[Any]:
        """What the model says and calls, in its order."""
        wanted = (Text, Reasoning, Refusal, Code, Function)
        return [part for leg in self.legs for part in flat(leg) if isinstance(part, wanted)]

    @property
    def calls(self) -> list[str]:
        return [kind_of(part) for part in self.parts if isinstance(part, (Code, Function))]

    @property
    def tokens(self) -> tuple[int, int]:
        used = [usage_of(leg) for leg in self.legs]
        return sum(each.input for each in used), sum(each.output for each in used)


def kind_of(part: Any) -> str:
    kinds = {Code: "code_interpreter_call", Function: "function_call", Reasoning: "reasoning"}
    return kinds.get(type(part), "message")


scripts = st.builds(
    lambda middle, last: Script([*middle, last]),
    st.lists(code_legs, max_size=2),
    last_legs | mixed_legs | cut_off_legs | failing_legs,
)


def same(output: Any) -> str:
    """An output without what differs between two runs: the ids."""
    return re.sub(r"\b(msg|rs|fc|ci|cntr|cfile)_[0-9a-z]+", r"\1_", json.dumps(output))
