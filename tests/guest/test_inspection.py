"""What a kernel tells of its variables, and that it runs nothing of the program's for it."""

from __future__ import annotations

import json

import pytest

TRAP = """
import os
def sprung(*args, **kwargs):
    os.write(2, b"SPRUNG")
    raise RuntimeError("a method of the program's ran")
"""


def inspect(kernel) -> tuple[dict, int]:
    """What is told of each name, and how many more there are."""
    kernel.send({"do": "inspect", "ask": "q"})
    header, body = kernel.frame()
    assert (header["ev"], header["ask"]) == ("inspected", "q")
    return {each["name"]: each for each in json.loads(body)}, header["more"]


def told(kernel, code: str) -> dict:
    run = kernel.run(code)
    assert run.outcome == "ok", run.events
    found, more = inspect(kernel)
    assert more == 0
    after = kernel.run("None")
    assert "SPRUNG" not in after.stderr
    return found


@pytest.mark.parametrize(
    ("value", "kind", "preview"),
    [
        ("1", "int", "1"),
        ("10**1000", "int", "<int of 3322 bits>"),
        ("1.5", "float", "1.5"),
        ("None", "NoneType", "None"),
        ("'a\\n'", "str", "'a\\n'"),
        ("b'a'", "bytes", "b'a'"),
        ("[1, 'x', (2,)]", "list", "[1, 'x', (2,)]"),
        ("{'k': {1}}", "dict", "{'k': {1}}"),
        ("set()", "set", "set()"),
        ("range(3)", "range", "range(0, 3)"),
        ("__import__('datetime').date(2024, 1, 2)", "datetime.date", "datetime.date(2024, 1, 2)"),
        ("__import__('collections').deque([1])", "collections.deque", "deque([1])"),
        ("'\\ud800'", "str", "'\\ud800'"),
        ("__import__('uuid').UUID(int=0)", "uuid.UUID", "<uuid.UUID>"),
        ("__import__('decimal').Decimal('1.50')", "decimal.Decimal", "Decimal('1.50')"),
    ],
)
def test_a_value_of_pythons_own_is_shown(kernel, value, kind, preview):
    one = told(kernel, f"x = {value}")["x"]
    assert (one["type"], one["preview"], one["kind"]) == (kind, preview, "variable")
    assert one.get("size_bytes", 1) > 0


def test_arrays_and_tables_have_a_shape(kernel):
    found = told(
        kernel,
        "import numpy as np, pandas as pd\n"
        "a = np.arange(6.0).reshape(2, 3); n = np.int32(7); o = np.array([object(), 1], dtype=object)\n"
        "d = pd.DataFrame({'x': [1, 2], 's': ['a', 'b'], 't': pd.date_range('2024', periods=2)})\n"
        "s = d['x']; i = d.index; m = d.set_index(['x', 's']); c = pd.Series(['a', 'b'], dtype='category')",
    )
    assert (found["a"]["shape"], found["a"]["dtype"], found["a"]["size_bytes"]) == ([2, 3], "float64", 48)
    assert found["a"]["preview"] == "[0, 1, 2, 3, 4, 5]"
    assert (found["n"]["type"], found["n"]["preview"]) == ("numpy.int32", "7")
    assert found["o"]["preview"] == "[<object>, 1]"
    assert (found["d"]["type"], found["d"]["shape"]) == ("pandas.DataFrame", [2, 3])
    assert found["d"]["columns"] == ["x", "s", "t"]
    assert found["d"]["size_bytes"] >= 16
    assert (found["s"]["type"], found["s"]["shape"], found["s"]["preview"]) == ("pandas.Series", [2], "[1, 2]")
    assert (found["i"]["shape"], found["m"]["shape"], found["c"]["shape"]) == ([2], [2, 1], [2])
    assert (found["np"]["kind"], found["np"]["preview"]) == ("module", "<module 'numpy'>")


def test_times_and_missing_values_are_shown(kernel):
    found = told(
        kernel,
        "import numpy as np, pandas as pd\n"
        "t = pd.date_range('2024', periods=2); u = pd.Series([pd.Timedelta('1h'), None])\n"
        "i = pd.Series([1, None], dtype='Int64'); d = np.datetime64('2024-01-02'); m = np.ma.array([1, 2])\n"
        "f = pd.DataFrame({'a': [1]}, index=pd.CategoricalIndex(['x'])); e = pd.DataFrame()",
    )
    assert found["t"]["preview"] == "[2024-01-01 00:00:00, 2024-01-02 00:00:00]"
    assert found["u"]["preview"] == "[1:00:00, None]"
    assert found["i"]["preview"] == "[1, <NA>]"
    assert found["d"]["preview"] == "datetime.date(2024, 1, 2)"
    assert (found["m"]["shape"], found["m"]["preview"]) == ([2], "<numpy.ma.MaskedArray>")
    assert (found["f"]["shape"], found["e"]["shape"]) == ([1, 1], [0, 0])


def test_functions_classes_and_modules_are_told_as_such(kernel):
    found = told(kernel, "import os\ndef f(a, *, b=1): pass\nclass C: pass\ng = len")
    assert {name: each["kind"] for name, each in found.items()} == {
        "os": "module",
        "f": "function",
        "C": "class",
        "g": "function",
    }
    assert found["f"]["preview"] == "<function f(a, b)>"
    assert found["C"]["preview"] == "<class '__main__.C'>"


def test_names_of_ipythons_own_are_not_told(kernel):
    kernel.run("1")
    kernel.run("x: int = 2")
    assert list(inspect(kernel)[0]) == ["x"]
    assert list(told(kernel, "exit = 3\n%reset -f\ny = 1")) == ["y"]
    assert set(told(kernel, "exit = 3\nNone")) == {"y", "exit"}


def test_an_inspection_is_no_execution(kernel):
    kernel.run("x = 1")
    inspect(kernel)
    assert kernel.run("_ih[-2:], x").text == "(['x = 1', '_ih[-2:], x'], 1)"
    assert kernel.count == 2


HOSTILE = {
    "a method for everything": """
class A:
    __repr__ = __str__ = __len__ = __iter__ = __eq__ = __hash__ = __getattr__ = __sizeof__ = __bool__ = sprung
    __getattribute__ = __format__ = __index__ = __int__ = __reduce_ex__ = __class_getitem__ = __getitem__ = sprung
    __class__ = __dict__ = shape = dtype = nbytes = name = property(sprung)
x = A()
""",
    "a metaclass": """
class M(type):
    __repr__ = __getattribute__ = __eq__ = __hash__ = __instancecheck__ = __subclasscheck__ = __len__ = sprung
    __name__ = __mro__ = __dict__ = property(sprung)
    def mro(cls): return type.mro(cls)
A = type.__call__(M, "A", (), {})
x = object.__new__(A)
""",
    "subclasses of what is Python's own": """
class L(list): __repr__ = __len__ = __iter__ = sprung
class D(dict): __repr__ = __len__ = __iter__ = items = keys = sprung
class S(str): __repr__ = __len__ = __getitem__ = __str__ = encode = sprung
class I(int): __repr__ = __str__ = bit_length = sprung
class F(float): __repr__ = __format__ = sprung
x = [L(), D(), S("a"), I(1), F(1.0)]; y = L([1]); z = {S("k"): 1} if False else D(a=1); w = (S("s"),)
A = type(S("Name"), (), {"__module__": S("mod")}); v = A()
""",
    "a table and an array of classes of the program's": """
import pandas as pd, numpy as np
class N(np.ndarray):
    __repr__ = __len__ = __iter__ = __getitem__ = sprung
    shape = dtype = nbytes = flat = property(sprung)
n = np.zeros(3).view(N); m = np.ma.array([1, 2])
class T(pd.DataFrame):
    __repr__ = __len__ = __getattr__ = sprung
    shape = columns = property(sprung)
x = T({"a": [1]})
""",
    "a library that was changed": """
import pandas as pd, numpy as np
d = pd.DataFrame({"a": [1, 2]}); a = np.arange(3)
pd.DataFrame.shape = pd.DataFrame.columns = property(sprung)
pd.DataFrame.__len__ = pd.DataFrame.__repr__ = pd.DataFrame.memory_usage = pd.Index.__len__ = sprung
np.array_repr = np.array2string = sprung
""",
    "modules that are others": """
import sys, types
class Fake(types.ModuleType):
    def __getattribute__(self, name): sprung()
sys.modules["numpy"] = sys.modules["pandas"] = x = Fake("numpy")
class DataFrame:
    shape = property(sprung)
    __getattr__ = sprung
DataFrame.__module__ = "pandas"; y = DataFrame()
class ndarray:
    shape = dtype = flat = property(sprung)
ndarray.__module__ = "numpy"; z = ndarray()
""",
    "builtins that are others": """
import builtins, sys, gc, time
def watched(original):
    def called(*args, **kwargs):
        if sys._getframe(1).f_code.co_filename.endswith(("inspection.py", "bare.py", "arrays.py")): sprung()
        return original(*args, **kwargs)
    return called
for name in ("repr", "len", "iter", "max", "any", "next", "sum", "id", "map", "isinstance", "hasattr", "getattr"):
    setattr(builtins, name, watched(getattr(builtins, name)))
sys.getsizeof = sys.settrace = sys.gettrace = gc.disable = gc.isenabled = sprung
time.monotonic = watched(time.monotonic)
x = [1, {2: "a"}, range(3)]; f = max; import pandas as pd; d = pd.DataFrame({"a": [1]})
""",
    "keys that compare themselves": """
class K(str):
    def __hash__(self): return hash(str(self))
    def __eq__(self, other): sprung()
class C: pass
x = C(); x.__dict__[K("_mgr")] = 1
globals()[K("odd")] = 1; globals()[5] = 6
""",
    "a mapping that lies": """
import collections.abc
class Lying(collections.abc.Mapping):
    def __len__(self): return 10**12
    def __iter__(self):
        while True: yield 1
    __getitem__ = sprung
x = Lying(); y = collections.OrderedDict(a=x); z = collections.defaultdict(sprung, a=1)
""",
    "a time zone, a slice and a table's cell": """
import datetime, pandas as pd
class Z(datetime.tzinfo):
    __repr__ = utcoffset = tzname = dst = sprung
class A: __repr__ = __str__ = sprung
t = datetime.datetime(2024, 1, 1, tzinfo=Z()); s = slice(A(), None); d = pd.DataFrame({"a": [A()]}); i = pd.Index([A()])
""",
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_of_the_programs_runs(kernel, hostile):
    started = kernel.run(TRAP + HOSTILE[hostile])
    assert started.outcome == "ok", started.events
    found, _more = inspect(kernel)
    assert found
    after = kernel.run("None")
    assert "SPRUNG" not in "".join(str(event) for event in after.events)


def test_a_tracer_sees_nothing_of_it_and_stays(kernel):
    kernel.run(
        "import sys, gc\nseen = []\ndef watch(frame, *_):\n"
        "    seen.append((frame.f_code.co_filename, frame.f_code.co_name))\n"
        "gc.callbacks.append(lambda *_: seen.append(('gc', 'gc')))\nx = [[] for _ in range(1000)]\n"
        "sys.setprofile(watch)\nsys.settrace(watch)"
    )
    inspect(kernel)
    run = kernel.run(
        "t, p = sys.gettrace() is watch, sys.getprofile() is watch\nsys.settrace(None); sys.setprofile(None)\n"
        "t, p, {n for f, n in seen if f.endswith(('variables.py', 'safe_read.py', 'variables_tables.py'))}"
    )
    assert run.text == "(True, True, {'answer_inspect'})"  # which sends them away


def test_previews_are_bounded(kernel):
    found = told(
        kernel,
        "cyclic = []; cyclic.append(cyclic)\nloop = {}; loop['a'] = loop\ntext = 'x' * 10**7\nblob = bytes(10**7)\n"
        "deep = []\nfor _ in range(5000): deep = [deep]\nwide = list(range(10**6))\n"
        "many = {i: 'y' * 1000 for i in range(1000)}\nnumber = 1 << 10**6\n",
    )
    assert all(len(each["preview"]) <= 200 for each in found.values())
    assert found["cyclic"]["preview"] == "[[[[[…]]]]]"
    assert found["wide"]["length"] == 10**6
    assert found["text"]["size_bytes"] > 10**7


def test_of_many_variables_the_first_are_told(kernel):
    kernel.run("for i in range(100_000): globals()[f'v{i}'] = i\ndel i")
    found, more = inspect(kernel)
    assert (len(found), more) == (1000, 99_000)
    assert found["v0"]["preview"] == "0"


def test_large_descriptions_leave_others_out(kernel):
    kernel.run("for i in range(1000): globals()['ж' * 150 + str(i)] = ['ж' * 300] * 9\ndel i")
    found, more = inspect(kernel)
    assert len(found) + more == 1000
    assert more > 0


def test_names_that_are_no_identifiers(kernel):
    found = told(kernel, "globals().update({'not a name': 1, '': 2, '\\ud800': 3, 'x' * 1000: 4, 5: 6})")
    assert set(found) == {"not a name", "", "\\ud800", "x" * 200}


def test_inspection_waits_for_the_running_cell(kernel):
    kernel.start("import time; time.sleep(0.2); x = 1")
    kernel.send({"do": "inspect", "ask": "later"})
    list(kernel.events())
    assert json.loads(kernel.frame()[1])[-1]["name"] == "x"


def test_a_program_that_broke_the_kernel_keeps_it(kernel):
    kernel.run("import cloche.guest.kernel.variables as i\ni.describe_variable = lambda *_: 1/0\nx = 1")
    kernel.send({"do": "inspect", "ask": "q"})
    header, _body = kernel.frame()
    assert header["problem"] == "they cannot be told (ZeroDivisionError)"
    assert kernel.run("x").text == "1"
