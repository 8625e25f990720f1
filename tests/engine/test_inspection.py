"""What a context's variables are, and what ran in a sandbox."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from cloche import errors
from cloche.engine.engine import Engine
from cloche.engine.executions.history import export_notebook, read_history
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def run(box: Sandbox, code: str, context: str | None = None):
    return await box.context(context).execute(code).result()


async def test_variables_are_told_without_a_cell(box: Sandbox):
    await run(box, "import numpy as np\nx = [1, 2]; a = np.zeros((2, 3))")
    x, a = [each for each in await box.context().variables() if each.kind == "variable"]
    assert (x.name, x.type, x.length, x.preview) == ("x", "list", 2, "[1, 2]")
    assert (a.name, a.type, a.shape, a.dtype, a.size_bytes) == ("a", "numpy.ndarray", (2, 3), "float64", 48)
    assert (await run(box, "x")).count == 2
    assert len(read_history(box)) == 2


async def test_variables_wait_for_their_turn(box: Sandbox):
    slow = asyncio.ensure_future(run(box, "import time; time.sleep(0.3); x = 1"))
    await asyncio.sleep(0.05)
    assert [each.name for each in await box.context().variables()] == ["time", "x"]
    assert (await slow).ok


async def test_a_kernel_that_is_gone_has_no_variables(box: Sandbox):
    await run(box, "x = 1\nimport os; os._exit(3)")
    assert await box.context().variables() == []
    assert (await run(box, "1")).stderr == ""  # it was told by the execution on which it died


async def test_contexts_of_other_languages_have_variables(box: Sandbox):
    for language, code in (("bash", "x='a b'; y=(1 2)"), ("javascript", "let x = 'a b', y = [1, 2]")):
        context = await box.create_context(language=language)
        assert (await context.execute(code).result()).ok
        found = {each.name: each for each in await context.variables()}
        assert set(found) == {"x", "y"}
        assert (found["x"].type, found["x"].length, found["y"].length) == ("string", 3, 2)


HOSTILE_JAVASCRIPT = """
let sprung = 0;
const trap = () => { sprung += 1; };
class P { get x() { trap(); } toJSON() { trap(); } }
let p = new P(), px = new Proxy([], new Proxy({}, { get: trap })), o = { get q() { trap(); } };
let arr = [1, , 2]; arr.push(arr); let bad = '\\ud800'; let big = 10n ** 300n;
Object.defineProperty(globalThis, 'acc', { get: trap, configurable: true });
Object.setPrototypeOf(globalThis.under = {}, px);
0
"""


async def test_no_getter_and_no_trap_of_a_proxy_runs(box: Sandbox):
    context = await box.create_context(language="javascript")
    assert (await context.execute(HOSTILE_JAVASCRIPT).result()).ok
    found = {each.name: each for each in await context.variables()}
    assert (found["acc"].type, found["px"].type, found["p"].type) == ("accessor", "Proxy", "P")
    assert found["o"].preview == "{q: <accessor>}"
    assert (await context.execute("sprung").result()).text == "0"


async def test_a_shells_variable_is_not_evaluated(box: Sandbox):
    context = await box.create_context(language="bash")
    await context.execute(
        "a=(1); declare -n ref='a[$(touch sprung; echo 0)]'; set -u; declare unset; f='$(touch it)'"
    ).result()
    found = {each.name: each for each in await context.variables()}
    assert (found["ref"].type, found["f"].preview) == ("nameref", "'$(touch it)'")
    assert (await context.execute("ls; [[ $- == *u* ]] && echo strict").result()).stdout == "strict\n"


ANSWERS = {
    "no JSON": "{'more': 0}, b'x'",
    "no list": "{'more': 0}, b'{}'",
    "a kind that is none": """{'more': 0}, b'[{"name": "a", "type": "b", "kind": "c"}]'""",
    "a count that is none": "{'more': -1}, b'[]'",
    "too much": "{'more': 0}, b' ' * (1 << 21)",
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_kernel_that_lies_is_an_error(box: Sandbox, answer: str):
    await run(box, _lying(ANSWERS[answer]))
    with pytest.raises(errors.ProtocolViolation):
        await box.context().variables()
    assert (await run(box, "1")).text == "1"


def _lying(answer: str) -> str:
    return (
        f"import cloche.guest.kernel.variables as i\ndef lie(_, ask):\n    header, body = {answer}\n"
        "    return {'ev': 'inspected', 'ask': ask, **header}, body\ni.answer_inspect = lie"
    )


async def test_a_kernel_that_cannot_tell_says_why(box: Sandbox):
    await run(box, _lying("{'problem': 'they ' + 'x' * 5000}, b''"))
    with pytest.raises(errors.Unavailable, match=r"they x+$"):
        await box.context().variables()


async def test_inspection_answers_of_a_kernel_are_bounded(box: Sandbox):
    one = {"name": "n" * 5000, "type": "t" * 500, "preview": "p" * 500, "shape": [-1] * 100, "columns": ["c"] * 90}
    await run(box, _lying("{'more': 5}, " + repr(json.dumps([one] + [{"name": "a", "type": "b"}] * 1500).encode())))
    found = await box.context().variables()
    assert (len(found), found.more) == (1000, 506)
    first = found[0]
    assert (len(first.name), len(first.preview), len(first.columns or ())) == (200, 200, 50)
    assert first.shape == (0,) * 64


async def test_an_answer_that_does_not_come_is_not_waited_for_for_ever(box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cloche.engine.executions.variables.INSPECTION_SECONDS", 0.2)
    await run(
        box,
        "import cloche.guest.kernel.variables as i, time\n"
        "i.answer_inspect = lambda *_: (time.sleep(0.6), ({'ev': 'x'}, b''))[1]",
    )
    with pytest.raises(errors.Unavailable, match="busy"):
        await box.context().variables()
    assert (await run(box, "2")).text == "2"


async def test_a_kernel_that_dies_of_it_is_an_error(box: Sandbox):
    await run(box, "import cloche.guest.kernel.variables as i, os\ni.answer_inspect = lambda *_: os._exit(3)")
    with pytest.raises(errors.Unavailable, match="code 3"):
        await box.context().variables()
    assert (await run(box, "2")).text == "2"


async def test_a_restart_ends_an_inspection(box: Sandbox):
    await run(box, "import cloche.guest.kernel.variables as i, time\ni.answer_inspect = lambda *_: time.sleep(600)")
    asked = asyncio.ensure_future(box.context().variables())
    await asyncio.sleep(0.05)
    await box.context().restart()
    with pytest.raises(errors.Unavailable, match="stopped"):
        await asked
    assert (await run(box, "2")).text == "2"


async def test_a_sandbox_that_has_ended_has_no_variables(engine: Engine):
    box = await engine.create(SandboxSpec())
    context = box.context()
    await box.kill()
    with pytest.raises(errors.SandboxKilled):
        await context.variables()
    with pytest.raises(errors.SandboxKilled):
        read_history(box)


async def test_history_has_every_cell_in_its_order(box: Sandbox):
    began = time.time()
    await run(box, "print('hi'); 6 * 7")
    other = await box.create_context(language="bash")
    await other.execute("echo out; echo err >&2; exit 3").result()
    await run(box, "1/0")
    await box.context().execute("secret", recorded=False).result()
    first, second, third = read_history(box)
    assert (first.code, first.count, first.outcome, first.language) == ("print('hi'); 6 * 7", 1, "ok", "python")
    assert began <= first.started_at <= time.time()
    assert 0 < (first.seconds or 0) < 60
    assert [each["output_type"] for each in first.outputs] == ["stream", "execute_result"]
    assert (second.context, second.language) == (other.id, "bash")
    assert sorted(each["name"] for each in second.outputs if each["output_type"] == "stream") == ["stderr", "stdout"]
    assert (third.outcome, third.outputs[0]["ename"]) == ("raised", "ZeroDivisionError")
    assert read_history(box, other.id) == [second]


async def test_history_is_kept_of_a_cell_whose_reader_left_and_of_a_context_that_is_gone(box: Sandbox):
    async with box.context().execute("print('begun', flush=True)\nwhile True: pass") as execution:
        async for event in execution:
            if "begun" in str(event):
                break
    assert read_history(box)[0].outcome == "interrupted"
    other = await box.create_context()
    await other.execute("1").result()
    box.remove_context(other.id)
    assert len(read_history(box, other.id)) == 1
    with pytest.raises(errors.ContextNotFound):
        read_history(box, "nobody")
    with pytest.raises(errors.ContextNotFound):
        await export_notebook(box, "nobody")


async def test_a_notebook_is_of_one_context(box: Sandbox):
    await run(box, "import matplotlib.pyplot as plt; plt.plot([1]); plt.show()\nfrom IPython.display import *")
    await run(box, "handle = display('old', display_id='d')")
    await run(box, "update_display('new', display_id='d'); print('gone'); clear_output(); print('stays')")
    other = await box.create_context(language="bash")
    made = json.loads(await export_notebook(box))
    picture, shown, cleared = made["cells"]
    assert picture["outputs"][0]["data"]["image/png"].startswith("iVBOR")
    assert shown["outputs"][0]["data"]["text/plain"] == ["'new'"]
    assert [each["text"] for each in cleared["outputs"]] == [["stays\n"]]
    assert json.loads(await export_notebook(box, other.id))["metadata"]["kernelspec"]["name"] == "bash"


async def test_a_fork_has_the_history_of_its_origin(box: Sandbox):
    await run(box, "x = 1")
    (copy,) = await box.context().fork()
    await run(box, "x = 2")
    await copy.execute("x").result()
    (second,) = await copy.fork()
    await copy.execute("x + 1").result()
    await second.execute("x + 2").result()
    assert [each.code for each in read_history(box, second.id)] == ["x = 1", "x", "x + 2"]
    assert [each.code for each in read_history(box, copy.id)] == ["x = 1", "x", "x + 1"]
    assert [each.code for each in read_history(box, "default")] == ["x = 1", "x = 2"]
    assert [each.name for each in await second.variables()] == ["x"]
