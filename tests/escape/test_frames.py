"""A program that speaks to the host itself: it owns its kernel's channel and output pipes, and may send anything."""

# ruff: noqa: E501 - a hostile program reads better with one try per line

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cloche import errors
from cloche.model import MIB

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(90)]

# What a hostile program needs: its channel, and the number of its own execution.
SPEAK = """
import array, gc, json, os, socket, struct, sys, time
from cloche.guest.kernel.channel import KernelChannel as Channel
channel = next(each for each in gc.get_objects() if isinstance(each, Channel))
sock = socket.socket(fileno=os.dup(channel.fileno()))
token = channel._token
def frames(*headers, body=b""):
    for header in headers:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        sock.sendall(struct.pack(">II", len(raw), len(body)) + raw + body)
def run_of_mine():
    for each in gc.get_objects():
        run = getattr(each, "run", None) if type(each).__module__.startswith("cloche") else None
        if isinstance(run, str) and run.startswith("x"): return run
    for each in gc.get_objects():
        if isinstance(each, str) and len(each) == 21 and each.startswith("x"): return each
    for each in gc.get_objects():
        if isinstance(each, dict) and isinstance(each.get("run"), str) and each["run"].startswith("x"): return each["run"]
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if isinstance(value, str) and len(value) == 21 and value.startswith("x"): return value
            if isinstance(value, dict) and isinstance(value.get("run"), str): return value["run"]
        frame = frame.f_back
run = run_of_mine()
assert run, "the attack needs to know its own execution"
"""

LIES = {
    "garbage": "sock.sendall(os.urandom(100_000))",
    "giant lengths": "sock.sendall(struct.pack('>II', 0xffffffff, 0xffffffff))",
    "giant body": "sock.sendall(struct.pack('>II', 2, 1 << 31) + b'{}')",
    "not JSON": "frames(b'{nonsense}')",
    "not an object": "frames(b'[1, 2, 3]')",
    "not text": "frames(b'\\xff\\xfe\\xfd')",
    "deep nesting": "frames(b'[' * 1_000_000)",
    "almost too deep": "[frames(('{\"ev\":' + '[' * n + ']' * n + '}').encode()) for n in range(850, 1000, 3)]",
    "almost too deep, mine": '[frames((\'{"ev": "ended", "run": "%s", "outcome":\' % run + \'[\' * n + \']\' * n + \'}\').encode()) for n in range(850, 1000, 3)]',
    "a number of a million digits": "frames(b'{\"ev\": \"ended\", \"mark\": ' + b'9' * 1_000_000 + b'}')",
    "no event": "frames({}, {'run': run}, {'ev': None, 'run': run})",
    "an unknown event": "frames({'ev': 'format_the_disk', 'run': run})",
    "init's events": "frames({'ev': 'kernel_exited', 'kernel': '0', 'status': 0}, {'ev': 'fatal', 'message': 'x', 'run': run})",
    "an answer": "frames({'id': 1, 'ok': {}}, {'id': 2, 'err': {'code': 'gone'}})",
    "an outcome of a strange kind": "frames({'ev': 'ended', 'run': run, 'outcome': ['ok']})",
    "an outcome that is an object": "frames({'ev': 'ended', 'run': run, 'outcome': {'a': 1}})",
    "an unknown outcome": "frames({'ev': 'ended', 'run': run, 'outcome': 'won'})",
    "strange numbers": "frames({'ev': 'ended', 'run': run, 'outcome': 'ok', 'cpu': 1e999, 'rss': -1, 'mark': -5, 'exit': [1]})",
    "a strange exit": "frames({'ev': 'ended', 'run': run, 'outcome': 'ok', 'exit': 10 ** 30})",
    "a mark beyond all": "frames({'ev': 'display', 'run': run, 'parts': [], 'mark': 1 << 70})",
    "a display without parts": "frames({'ev': 'display', 'run': run, 'parts': None})",
    "parts of negative length": "frames({'ev': 'display', 'run': run, 'parts': [['text/plain', -5]]})",
    "parts longer than their body": "frames({'ev': 'display', 'run': run, 'parts': [['text/plain', 1 << 40]]})",
    "a hundred thousand parts": "frames({'ev': 'display', 'run': run, 'parts': [['a', 0]] * 100_000})",
    "a MIME type that is no text": "frames({'ev': 'display', 'run': run, 'parts': [[['x'], 1]]}, body=b'x')",
    "deep JSON in a display": "body = b'[' * 500_000; frames({'ev': 'display', 'run': run, 'parts': [['application/json', len(body)]]}, body=body)",
    "lone surrogates": "frames({'ev': 'raised', 'run': run, 'name': '\\ud800', 'value': '\\udfff'}, {'ev': 'display', 'run': run, 'id': '\\ud800', 'parts': []})",
    "an exception without a name": "frames({'ev': 'raised', 'run': run, 'name': None})",
    "a question that is none": "frames({'ev': 'input', 'run': run, 'prompt': {'a': 1}})",
    "a file that is none": "frames({'ev': 'wrote', 'run': run, 'file': {'path': 5}})",
    "a file elsewhere": "frames({'ev': 'wrote', 'run': run, 'file': 'x' * 3_000_000})",
    "another's execution": "frames({'ev': 'ended', 'run': 'x' + '0' * 20, 'outcome': 'ok'}, {'ev': 'started', 'run': 'y', 'count': 1})",
    "descriptors that were not announced": "[sock.sendmsg([b''.join([struct.pack('>II', 2, 0), b'{}'])], [(1, 1, array.array('i', [0] * 8))]) for _ in range(50)]",
    "descriptors that did not come": "frames({'ev': 'ready', 'fds': 8})",
    "a count of descriptors that is none": "frames({'ev': 'ready', 'fds': 'many'}, {'ev': 'ready', 'fds': -1})",
    "readiness again and again": "frames(*[{'ev': 'ready'}] * 1000)",
    "half a frame": "sock.sendall(struct.pack('>II', 1000, 0) + b'{')",
    "the end": "sock.shutdown(socket.SHUT_RDWR)",
    "a closed descriptor": "os.close(channel.fileno())",
    "another file in its place": "os.dup2(os.open('/dev/zero', os.O_RDWR), channel.fileno())",
}


async def usable_or_gone(box) -> None:
    """Afterwards the sandbox runs code, or says clearly that it is gone."""
    try:
        run = await box.context().execute("20 + 22", timeout_seconds=20).result()
    except errors.Gone:
        return
    assert run.text == "42", run


@pytest.mark.parametrize("lie", LIES)
async def test_the_host_survives_a_frame_with(box, execute, lie):
    run = await execute(box, SPEAK + LIES[lie], 2)
    assert run.outcome in ("ok", "raised", "died", "timed_out", "interrupted"), run
    if run.error:
        assert "the attack needs" not in run.error.value, run.error
    await usable_or_gone(box)


async def test_an_end_that_was_forged_ends_that_execution_only(box, execute):
    code = SPEAK + "frames({'ev': 'ended', 'run': run, 'outcome': 'ok'}); print('after the end', flush=True); state = 7"
    assert (await execute(box, code, 5)).outcome == "ok"
    second = await execute(box, "state", 10)
    assert second.outcome == "ok" and second.text == "7"
    assert (await execute(box, "1 + 1")).text == "2"


async def test_marks_that_were_forged_hold_nothing_back_for_ever(box, execute):
    code = SPEAK + (
        "for number in (5, 900, 0xffffffff, 3): os.write(1, b'\\x1b]cloche;' + token.encode() + b';%08x\\x07text' % number)\n"
        "os.write(2, b'\\x1b]cloche;' + token.encode() + b';')"
    )
    run = await execute(box, code, 5)
    assert run.outcome == "ok"
    # Only the order of its own output depends on a kernel's honesty: some of it comes later, none is lost.
    later = [run, *[await execute(box, "print('next')") for _ in range(6)]]
    output = "".join(each.stdout for each in later)
    assert output.count("text") == 4 and "next\n" in output


@pytest.mark.long
async def test_frames_without_end_are_bounded(tight):
    before = int(Path("/proc/self/statm").read_text().split()[1])
    code = (
        SPEAK + "while True: frames({'ev': 'display', 'run': run, 'parts': [['text/plain', 1000]]}, body=b'x' * 1000)"
    )
    run = await tight.context().execute(code, timeout_seconds=3).result()
    assert run.outcome in ("timed_out", "died")
    assert sum(len(each.text or "") for each in run.results) <= tight.limits.output_bytes
    after = int(Path("/proc/self/statm").read_text().split()[1])
    assert (after - before) * os.sysconf("SC_PAGE_SIZE") < 300 * MIB
    await usable_or_gone(tight)


async def test_headers_without_end_are_bounded(tight):
    code = (
        SPEAK
        + "frames({'ev': 'cleared', 'run': run, 'x': ['y'] * 500_000}, *[{'ev': 'cleared', 'run': run}] * 200_000)"
    )
    run = await tight.context().execute(code, timeout_seconds=10).result()
    assert run.outcome in ("ok", "timed_out", "died")
    await usable_or_gone(tight)


async def test_a_frame_that_never_ends_costs_its_execution_the_time_limit_and_no_more(box, execute, neighbour):
    code = (
        SPEAK
        + "sock.sendall(struct.pack('>II', 4_000_000, 60 << 20))\nwhile True: sock.sendall(b' '); time.sleep(0.05)"
    )
    running = asyncio.create_task(execute(box, code, 2))
    await neighbour.sandbox.commands.run("true", timeout_seconds=10)
    assert (await running).outcome in ("timed_out", "died")
    await usable_or_gone(box)


@pytest.mark.long
async def test_a_program_that_reads_its_own_channel_hurts_only_itself(box, execute):
    code = (
        SPEAK
        + "import threading\nthreading.Thread(target=lambda: [sock.recv(1 << 16) for _ in range(3)], daemon=True).start()"
    )
    await execute(box, code, 5)
    first = await execute(box, "1", 3)
    assert first.outcome in ("ok", "timed_out", "died")
    await box.context().restart()
    assert (await execute(box, "2 + 2")).text == "4"


async def test_a_forked_child_cannot_speak_for_its_kernel(box, execute):
    code = "import os\npid = os.fork()\nif pid == 0:\n    print('child'); os._exit(0)\nos.waitpid(pid, 0); print('parent'); 5"
    run = await execute(box, code)
    assert run.outcome == "ok" and run.text == "5"


async def test_the_channel_of_init_cannot_be_reached(box, attack):
    """Init's channel could ask the host for anything that init may. It cannot be opened, copied or found."""
    for user in ("user", "root"):
        seen = await attack(
            box,
            """
answer = [attempt(lambda: os.readlink("/proc/1/fd/3")), attempt(lambda: os.open("/proc/1/fd/3", os.O_RDWR))]
answer.append(attempt(lambda: call("pidfd_getfd", os.pidfd_open(1), 3, 0)))
answer.append(attempt(lambda: call("ptrace", 16, 1, 0, 0)))
answer.append(attempt(lambda: open("/proc/1/mem", "rb+")))
""",
            user,
        )
        assert set(seen) <= {"EPERM", "EACCES", "ENOENT", "ENOSYS"}, seen
