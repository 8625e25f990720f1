"""Contexts of JavaScript, TypeScript and bash: the same events, interrupts, deaths and places as Python's."""

from __future__ import annotations

import asyncio
import signal

import pytest

from cloche import errors
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import AnyEvent, Display, Ended, Output, Raised, Run, Started, fold
from cloche.model import MIB, Limits, SandboxSpec

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

NODE = ["javascript", "typescript"]
ALL = [*NODE, "bash"]
SET = {"javascript": "kept = 41", "typescript": "const kept: number = 41", "bash": "kept=41"}
GET = {"javascript": "console.log(kept)", "typescript": "console.log(kept as any)", "bash": "echo $kept"}


ENDLESS_LOOP = """
let beats = 0, left = false
const pause = (ms) => new Promise((done) => setTimeout(done, ms))
async function main() {
  try { while (true) { beats += 1; console.log('running'); await pause(5) } } finally { left = true }
}
"""


async def run(context: Context, code: str, **how) -> Run:
    events = [event async for event in context.execute(code, **how)]
    assert isinstance(events[0], Started) and isinstance(events[-1], Ended)
    assert sum(isinstance(event, (Started, Ended)) for event in events) == 2
    return fold(events)


async def javascript(box: Sandbox, code: str, **how) -> Run:
    return await run(box.default_context("javascript"), code, **how)


async def bash(box: Sandbox, code: str, **how) -> Run:
    return await run(box.default_context("bash"), code, **how)


async def interrupted(context: Context, code: str) -> Run:
    """Interrupts once the program has said that it runs."""
    execution: Execution = context.execute(code)
    events: list[AnyEvent] = []
    async for event in execution:
        events.append(event)
        if isinstance(event, Output) and "running" in event.text:
            execution.interrupt()
    return fold(events)


# -- what all of them share


@pytest.mark.parametrize("language", ALL)
async def test_state_lives_on_and_output_is_told_apart(box: Sandbox, language: str):
    context = await box.create_context(language=language)
    assert context.language == language
    assert (await run(context, SET[language])).outcome == "ok"
    assert (await run(context, GET[language])).stdout == "41\n"
    said = await run(
        context, "echo out; echo err >&2" if language == "bash" else "console.log('out'); console.error('err')"
    )
    assert (said.stdout, said.stderr) == ("out\n", "err\n")


@pytest.mark.parametrize("language", ALL)
async def test_contexts_of_a_language_share_nothing(box: Sandbox, language: str):
    one, other = await box.create_context(language=language), await box.create_context(language=language)
    await run(one, SET[language])
    assert "41" not in (await run(other, GET[language])).stdout


@pytest.mark.parametrize("language", ALL)
async def test_environment_and_directory_hold_for_one_run(box: Sandbox, language: str):
    context = await box.create_context(language=language)
    hostile = 'it\'s "$HOME" `id` \\ \n2'
    show = 'printf %s "$V"; printf :; pwd' if language == "bash" else "console.log(`${process.env.V}:${process.cwd()}`)"
    during = await run(context, show, env={"V": hostile}, cwd="/tmp")
    assert during.stdout == f"{hostile}:/tmp\n"
    after = await run(context, show)
    assert after.stdout.removeprefix("undefined").endswith(":" + (await where(box, language)) + "\n")
    assert hostile not in after.stdout


async def where(box: Sandbox, language: str) -> str:
    context = await box.create_context(language=language)
    show = "pwd" if language == "bash" else "console.log(process.cwd())"
    return (await run(context, show)).stdout.strip()


@pytest.mark.parametrize("language", ALL)
async def test_a_directory_that_is_not_there_is_an_error_of_the_run(box: Sandbox, language: str):
    context = await box.create_context(language=language)
    refused = await run(context, SET[language], cwd="/nonexistent")
    assert refused.error is not None or refused.exit_code == 1
    assert (await run(context, SET[language])).outcome == "ok"


@pytest.mark.parametrize(
    ("language", "endless"),
    [
        ("javascript", "console.log('running'); while (true) {}"),
        ("javascript", "console.log('running'); await null; while (true) {}"),
        ("javascript", "console.log('running'); await new Promise(() => {})"),
        ("javascript", "console.log('running'); require('child_process').execSync('sleep 60')"),
        ("typescript", "const forever: boolean = true; console.log('running'); while (forever) {}"),
        ("bash", "echo running; while true; do :; done; echo never"),
        ("bash", "f() { echo running; sleep 60; echo never; }; f; echo never"),
        ("bash", "echo running; sleep 60 | cat; echo never"),
    ],
)
async def test_an_interrupt_keeps_the_state(box: Sandbox, language: str, endless: str):
    context = await box.create_context(language=language)
    await run(context, SET[language])
    stopped = await interrupted(context, endless)
    assert stopped.outcome == "interrupted" and "never" not in stopped.stdout
    assert (await run(context, GET[language])).stdout == "41\n"


@pytest.mark.parametrize("language", ALL)
async def test_an_interrupt_ends_a_run_that_has_only_just_started(box: Sandbox, language: str):
    context = await box.create_context(language=language)
    await run(context, SET[language])
    endless = "while true; do :; done" if language == "bash" else "while (true) {}"
    for _ in range(5):
        execution = context.execute(endless)
        events: list[AnyEvent] = []
        async for event in execution:
            events.append(event)
            if isinstance(event, Started):
                execution.interrupt()
        assert fold(events).outcome == "interrupted"
        assert (await run(context, GET[language])).stdout == "41\n"


@pytest.mark.parametrize("language", ALL)
async def test_interrupts_without_number_reach_the_one_run_that_they_were_meant_for(box: Sandbox, language: str):
    context = await box.create_context(language=language)
    await run(context, SET[language])
    endless = (
        "echo running; while true; do :; done" if language == "bash" else "console.log('running'); while (true) {}"
    )
    for _ in range(10):
        execution = context.execute(endless)
        events: list[AnyEvent] = []
        async for event in execution:
            events.append(event)
            for _ in range(50):
                execution.interrupt()
        assert fold(events).outcome == "interrupted"
        assert (await run(context, GET[language])).stdout == "41\n"


@pytest.mark.parametrize("language", ALL)
async def test_a_signal_between_two_runs_reaches_neither(box: Sandbox, language: str):
    context = await box.create_context(language=language)
    await run(context, SET[language])
    for _ in range(10):
        (await context.kernel()).signal(signal.SIGINT)
        assert (await run(context, GET[language])).stdout == "41\n"


async def test_a_signal_at_the_end_of_a_run_does_not_end_the_next(box: Sandbox):
    context = await box.create_context(language="javascript")
    for _ in range(20):
        await run(context, "process.kill(process.pid, 'SIGINT'); 'the last word'")
        assert (await run(context, "'next'")).text == "'next'"


async def test_no_moment_is_there_in_which_a_signal_kills_a_kernel_of_node(box: Sandbox):
    context = await box.create_context(language="javascript")
    pid = (await run(context, "kept = 41; process.pid")).text
    shower = asyncio.create_task(bash(box, f"for i in {{1..2000}}; do kill -INT {pid}; done"))
    while not shower.done():
        assert (await run(context, "await null; 1")).outcome in ("ok", "interrupted")
    assert (await shower).exit_code == 0
    assert (await run(context, GET["javascript"])).stdout == "41\n"


async def test_listeners_of_a_program_do_not_keep_interrupts_from_it(box: Sandbox):
    context = await box.create_context(language="javascript")
    await run(context, "kept = 41; process.on('SIGINT', () => console.log('heard'))")
    for endless in ("while (true) {}", "process.removeAllListeners('SIGINT'); while (true) {}"):
        assert (await interrupted(context, f"console.log('running'); {endless}")).outcome == "interrupted"
    waiting = "process.on('SIGINT', () => { heard = true }); console.log('running'); await new Promise(() => {})"
    assert (await interrupted(context, waiting)).outcome == "interrupted"
    assert (await run(context, "[kept, heard]")).text == "[ 41, true ]"


async def test_a_program_that_a_run_waited_for_and_that_died_of_a_signal_of_its_own_is_an_error(box: Sandbox):
    died = await javascript(box, "require('child_process').execSync('kill -INT $$')")
    assert died.outcome == "raised" and died.error is not None and "Command failed" in died.error.value


@pytest.mark.parametrize("status", [0, 3])
async def test_bash_drops_an_interrupted_cell_in_any_case(box: Sandbox, status: int):
    context = await box.create_context(language="bash")
    await run(context, SET["bash"])
    command = f"trap 'exit {status}' INT; echo running; while :; do sleep 0.05; done"
    for cell in (f'bash -c "{command}"; echo never', f'bash -c "{command}" | cat; echo never'):
        stopped = await interrupted(context, cell)
        assert stopped.outcome == "interrupted" and "never" not in stopped.stdout
        assert (await run(context, GET["bash"])).stdout == "41\n"


async def test_a_trap_of_the_program_in_bash_is_the_programs_affair(box: Sandbox):
    context = await box.create_context(language="bash")
    trapped = await interrupted(context, "trap 'echo mine' INT; echo running; sleep 60; echo after")
    assert (trapped.outcome, trapped.stdout) == ("ok", "running\nmine\nafter\n")
    assert (await run(context, "trap -p INT; trap - INT")).stdout == "trap -- 'echo mine' SIGINT\n"
    assert (await interrupted(context, "echo running; sleep 60; echo never")).outcome == "interrupted"


async def test_a_loop_that_awaits_does_not_go_on_after_an_interrupt(box: Sandbox):
    context = await box.create_context(language="javascript")
    await run(context, ENDLESS_LOOP)
    assert (await interrupted(context, "await main()")).outcome == "interrupted"
    still = await run(context, "await pause(50); const seen = beats; await pause(50); [left, beats === seen]")
    assert still.text == "[ true, true ]"
    assert (await run(context, "const old = main(); await pause(20); beats > seen")).text == "true"


@pytest.mark.parametrize("language", ALL)
async def test_a_run_that_takes_too_long_is_stopped_and_the_state_kept(box: Sandbox, language: str):
    context = await box.create_context(language=language)
    await run(context, SET[language])
    endless = "while true; do :; done" if language == "bash" else "while (true) {}"
    late = await run(context, endless, timeout_seconds=0.5)
    assert late.outcome == "timed_out"
    assert (await run(context, GET[language])).stdout == "41\n"


@pytest.mark.parametrize("language", ALL)
async def test_an_exit_ends_the_context_with_its_status_and_the_next_run_has_a_new_one(box: Sandbox, language: str):
    context = await box.create_context(language=language)
    ended = await run(context, "exit 3" if language == "bash" else "process.exit(3)")
    assert (ended.outcome, ended.exit_code) == ("died", 3)
    assert (await run(context, SET[language])).outcome == "ok"


@pytest.mark.parametrize("language", ALL)
async def test_a_death_between_runs_is_said_once(box: Sandbox, language: str):
    context = await box.create_context(language=language)
    later = "(sleep 0.2; kill -9 $$) &" if language == "bash" else "setTimeout(() => process.exit(7), 200)"
    assert (await run(context, later)).outcome == "ok"
    for _ in range(100):
        if context._kernel is None:
            break
        await asyncio.sleep(0.1)
    assert "the context's state was lost" in (await run(context, SET[language])).stderr
    assert (await run(context, GET[language])).stderr == ""


@pytest.mark.parametrize("language", ALL)
async def test_a_restart_forgets(box: Sandbox, language: str):
    context = await box.create_context(language=language)
    await run(context, SET[language])
    await context.restart()
    assert "41" not in (await run(context, GET[language])).stdout


async def test_files_that_a_cell_writes_are_told(box: Sandbox, config):
    if config.backend != "namespaces":
        pytest.skip("without walls there is no /mnt/data")
    for language, code in (
        ("javascript", "require('fs').writeFileSync('a.txt', 'hello')"),
        ("bash", "printf hello > b.txt"),
    ):
        context = await box.create_context(language=language)
        written = await run(context, code)
        assert [(file.name, file.size_bytes) for file in written.files] == [
            ("b.txt" if language == "bash" else "a.txt", 5)
        ]


@pytest.mark.parametrize("language", ALL)
async def test_memory_that_runs_out_is_said_so(engine, config, language: str):
    if config.backend != "namespaces":
        pytest.skip("without walls there are no limits")
    box = await engine.create(SandboxSpec(limits=Limits(memory_bytes=160 * MIB, space_bytes=16 * MIB)))
    try:
        context = await box.create_context(language=language)
        code = "const a = []; while (true) a.push(Buffer.alloc(8 << 20, 1))"
        code = "x=a; while true; do x=$x$x; done" if language == "bash" else code
        assert (await run(context, code)).outcome == "out_of_memory"
        assert (await run(context, SET[language])).outcome == "ok"
    finally:
        await box.kill()


async def test_a_language_that_does_not_exist_is_refused_with_those_that_do(box: Sandbox):
    with pytest.raises(errors.InvalidRequest, match=r"no language 'cobol'.*python, javascript, typescript, bash"):
        await box.create_context(language="cobol")


# -- JavaScript


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1 + 1", "2"),
        ("'abc'", "'abc'"),
        ("({a: [1, {b: 2}]})", "{ a: [ 1, { b: 2 } ] }"),
        ("{a: 1}", "{ a: 1 }"),
        ("await Promise.resolve('later')", "'later'"),
        ("Promise.resolve(5)", "5"),
        ("const {a, ...rest} = {a: 1, b: 2}; rest", "{ b: 2 }"),
        ("for await (const x of [1, 2]) x; 'done'", "'done'"),
        ("import { sep } from 'path'; sep", "'/'"),
        ("import os, * as all from 'node:os'; all.default === os", "true"),
        ("(await import('node:path')).sep", "'/'"),
        ("require('path').basename('/a/b')", "'b'"),
        ("const crypto = require('crypto'); typeof crypto.createHash", "'function'"),
        ("export const shared = 9; shared", "9"),
        ("export default function main() { return 7 }\nmain()", "7"),
        ("typeof import.meta.url", "'string'"),
        ("require.main === module", "true"),
        ("let x = 1; // a comment at the end", None),
        ("", None),
        ("undefined", None),
        ("null", "null"),
    ],
)
async def test_the_value_of_a_cell(box: Sandbox, code: str, text: str | None):
    ran = await javascript(box, code)
    assert (ran.error, ran.outcome, ran.text) == (None, "ok", text)


async def test_a_name_may_be_declared_again_in_any_way(box: Sandbox):
    ways = [
        "let n = 0",
        "const n = 1",
        "var n = 2",
        "class n {}",
        "function n() {}",
        "import n from 'fs'",
        "let [n] = [6]",
    ]
    for way in [*ways, *reversed(ways)]:
        assert (await javascript(box, way)).error is None, way


@pytest.mark.parametrize(
    ("code", "name", "value", "place"),
    [
        ("\n\nthrow new TypeError('bad')", "TypeError", "bad", "[cell 1]:3"),
        ("\nfunction f() { null.x }\nf()", "TypeError", "null", "at f ([cell 1]:2"),
        (
            "async function f() {\n await 1; throw new RangeError('deep') }\nawait f()",
            "RangeError",
            "deep",
            "at f ([cell 1]:2",
        ),
        ("let a = 1\nlet b c", "SyntaxError", "Unexpected identifier 'c'", "[cell 1]:2"),
        ("\nawait nope()", "ReferenceError", "nope is not defined", "[cell 1]:2"),
        ("throw 5", "Uncaught", "5", "Uncaught 5"),
        ("Promise.reject(new Error('alone')); 1", "Error", "alone", "[cell 1]:1"),
        ("setTimeout(() => { throw new Error('late') }); await new Promise(() => {})", "Error", "late", "[cell 1]:1"),
        ("import 'no-such-package'", "Error", "no-such-package", "ERR_MODULE_NOT_FOUND"),
    ],
)
async def test_an_error_has_the_programs_own_lines(box: Sandbox, code: str, name: str, value: str, place: str):
    failed = await run(await box.create_context(language="javascript"), code)
    assert failed.outcome == "raised" and failed.error is not None
    assert failed.error.name == name and value in failed.error.value
    assert place in failed.error.traceback and "/guest/languages/node/" not in failed.error.traceback


async def test_a_failure_after_the_run_kills_nothing_and_is_shown_in_the_next(box: Sandbox):
    for failure in ("throw new Error('left behind')", "Promise.reject(new Error('left behind'))"):
        await javascript(box, f"let failed = false; setTimeout(() => {{ failed = true; {failure} }}, 100)")
        following = await javascript(box, "while (!failed) await new Promise((done) => setTimeout(done, 5)); 'lives'")
        assert (following.error, following.text) == (None, "'lives'")
        assert "left behind" in following.stderr + (await javascript(box, "1")).stderr


async def test_timers_go_on_between_runs(box: Sandbox):
    await javascript(box, "let ticks = 0; const timer = setInterval(() => ticks += 1, 5)")
    assert (
        await javascript(
            box, "const at = ticks; while (ticks < at + 3) await new Promise((d) => setTimeout(d, 5)); 'went on'"
        )
    ).text == "'went on'"


async def test_rich_results(box: Sandbox):
    code = """
$$.html('<b>1</b>'); display.svg('<svg/>'); $$.png(Buffer.from('89504e47', 'hex')); display({plain: [1]})
const shown = {_toHtml() { return '<i>2</i>' }, [Symbol.for('nodejs.util.inspect.custom')]: () => 'text of it'}
shown
"""
    bundles = [
        event.data async for event in box.default_context("javascript").execute(code) if isinstance(event, Display)
    ]
    assert bundles == [
        {"text/html": "<b>1</b>"},
        {"image/svg+xml": "<svg/>"},
        {"image/png": b"\x89PNG"},
        {"text/plain": "{ plain: [ 1 ] }", "application/json": {"plain": [1]}},
        {"text/plain": "text of it", "text/html": "<i>2</i>"},
    ]


async def test_output_and_displays_keep_their_order(box: Sandbox):
    code = "for (let i = 0; i < 5; i++) { console.log('o', i); display(i); console.error('e', i); display(-i) }; 'last'"
    seen: list[str] = []
    async for event in box.default_context("javascript").execute(code):
        if isinstance(event, Output):
            seen += event.text.splitlines()
        elif isinstance(event, Display):
            seen.append(event.data["text/plain"])
    assert seen == [one for i in range(5) for one in (f"o {i}", str(i), f"e {i}", str(-i) if i else "-0")] + ["'last'"]


async def test_streams_that_a_program_ends_are_there_for_the_next(box: Sandbox):
    assert (await javascript(box, "process.stdout.end('bye'); process.stderr.destroy()")).stdout == "bye"
    assert (await javascript(box, "console.log('still'); console.error('here')")).stdout == "still\n"


async def test_a_variable_may_have_the_name_of_anything_that_the_kernel_stands_on(box: Sandbox):
    context = await box.create_context(language="javascript")
    names = "process Buffer JSON Object Reflect Symbol String Number Array Error Promise Map Set setImmediate".split()
    assert (await run(context, "; ".join(f"const {name} = 'mine'" for name in names))).error is None
    assert (await run(context, "console.log('said'); [process, 1]")).text == "[ 'mine', 1 ]"
    assert (await run(context, "nope")).outcome == "raised"


async def test_a_large_output_arrives_whole(box: Sandbox):
    assert (await javascript(box, "console.log('x'.repeat(3 << 20))")).stdout == "x" * (3 << 20) + "\n"


# -- TypeScript


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("interface Point { x: number }\nconst p: Point = { x: 1 }; p.x as number", "1"),
        ("enum Colour { Red = 1, Green }; Colour.Green", "2"),
        ("namespace Inner { export const z = 3 }; Inner.z", "3"),
        ("function same<T>(x: T): T { return x }; same<string>('s')", "'s'"),
        (
            "import type { Stats } from 'fs'\nimport { sep } from 'path'\nconst v: string = await sep\nv",
            "'/'",
        ),
    ],
)
async def test_typescript_runs(box: Sandbox, code: str, text: str):
    ran = await run(box.default_context("typescript"), code)
    assert (ran.error, ran.text) == (None, text)


async def test_typescript_says_where_it_failed(box: Sandbox):
    context = await box.create_context(language="typescript")
    failed = await run(context, "type T = string\nconst t: T = 'x'\nthrow new Error(t)")
    assert failed.error is not None and "[cell 1]:3" in failed.error.traceback
    wrong = await run(context, "const t: = 1")
    assert wrong.error is not None and wrong.error.name == "SyntaxError"


# -- bash


@pytest.mark.parametrize(
    ("code", "stdout", "exit_code"),
    [
        ("echo one; false", "one\n", 1),
        ("(exit 42)", "", 42),
        ("cat <<'EOF'\na $x\nb\nEOF", "a $x\nb\n", 0),
        ("for i in 1 2; do\n  echo $i\ndone", "1\n2\n", 0),
        ('read line; echo "[$line]"', "[]\n", 0),
        ("if then", "", 2),
        ("nosuchcommand", "", 127),
        ("echo 'it''s' \"two  words\" \\$x", "its two  words $x\n", 0),
        ("printf 'no newline'", "no newline", 0),
        ("", "", 0),
        ("# nothing", "", 0),
    ],
)
async def test_a_cell_of_bash_has_output_and_an_exit_status(box: Sandbox, code: str, stdout: str, exit_code: int):
    ran = await bash(box, code)
    assert (ran.outcome, ran.error, ran.stdout, ran.exit_code) == ("ok", None, stdout, exit_code)


async def test_functions_directory_and_exports_of_bash_live_on(box: Sandbox):
    await bash(box, 'greet() { echo "hello $1"; }; mkdir -p /tmp/there; cd /tmp/there; export GIVEN=yes')
    assert (await bash(box, "greet you; basename $PWD; env | grep ^GIVEN=")).stdout == "hello you\nthere\nGIVEN=yes\n"


async def test_bash_has_its_own_variables_back_after_a_run_with_others(box: Sandbox):
    await bash(box, "A=own; export B=exported; C=(1 2)")
    await bash(box, "A=changed; unset B", env={"A": "1", "B": "2", "C": "3", "D": "4"})
    assert (await bash(box, 'echo $A $B ${C[1]} ${D-unset}; env | grep -c "^A="')).stdout == "own exported 2 unset\n0\n"


async def test_a_job_in_the_background_goes_on_and_survives_an_interrupt(box: Sandbox):
    context = await box.create_context(language="bash")
    await run(context, "sleep 300 & job=$!")
    assert (await interrupted(context, "echo running; sleep 60")).outcome == "interrupted"
    assert (await run(context, "kill -0 $job && echo lives; kill $job")).stdout == "lives\n"


async def test_prompts_and_traces_of_our_own_commands_are_not_shown(box: Sandbox):
    context = await box.create_context(language="bash")
    shown = [
        await run(context, code)
        for code in ("PS1='prompt> '; PS2='more> '", "set -x", "echo a", "{ set +x; } 2>/dev/null")
    ]
    assert [each.stderr for each in shown] == ["", "", "++ echo a\n", ""]


@pytest.mark.parametrize(
    "first",
    [
        "builtin() { :; }",
        "unset() { :; }",
        "eval() { :; }; printf() { :; }; history() { :; }",
        "alias builtin=: unset=: printf=: eval=:",
        "set -u",
        "trap 'true x' DEBUG",
        "PROMPT_COMMAND='sleep 1234'",
        "PROMPT_COMMAND=('sleep 1234' 'sleep 1234')",
        "builtin() { echo noise; }",
    ],
)
async def test_no_name_that_a_program_defines_stands_in_our_way(box: Sandbox, first: str):
    context = await box.create_context(language="bash")
    cells = (first, "(exit 3)", "echo ${A-}", "exec 3<&0; echo end")
    shown = [await run(context, code, timeout_seconds=30) for code in cells]
    assert [(each.outcome, each.exit_code) for each in shown] == [("ok", 0), ("ok", 3), ("ok", 0), ("ok", 0)]
    assert [each.stdout for each in shown] == ["", "", "\n", "end\n"]
    env = await run(context, "echo $A $PWD", env={"A": "given"}, cwd="/tmp", timeout_seconds=30)
    assert env.stdout == "given /tmp\n"


async def test_the_history_of_bash_has_no_line_of_ours(box: Sandbox):
    context = await box.create_context(language="bash")
    assert (await run(context, "history")).stdout == ""
    await run(context, "set -o history")
    assert (await run(context, "history -s mine; history")).stdout.split() == ["1", "mine"]


async def test_a_program_in_bash_sees_no_descriptor_of_ours(box: Sandbox):
    assert (await bash(box, "ls /proc/self/fd | sort -n | tr '\\n' ' '")).stdout == "0 1 2 3 "


async def test_raised_is_for_node_only(box: Sandbox):
    events = [event async for event in box.default_context("bash").execute("false")]
    assert not any(isinstance(event, Raised) for event in events)
