"""What a sandbox can make the host's process hold: each flood has a bound, measured here, and most of it goes with the sandbox."""

# ruff: noqa: E501 - a hostile program reads better with one try per line

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cloche import errors
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import MIB, Limits, SandboxSpec

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.long,
    pytest.mark.alone,
]

SECONDS = 2.0
LIMITS = Limits(memory_bytes=512 * MIB, space_bytes=64 * MIB, processes=128, output_bytes=8 * MIB)


def held_bytes() -> int:
    """Of this process, which is the host's: its engine runs here."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def _run(box: Sandbox, code: str, seconds: float = SECONDS) -> None:
    with contextlib.suppress(errors.ClocheError):
        await box.context().execute(code, timeout_seconds=seconds).result()


async def changes(box: Sandbox) -> None:
    """Files with long names, made and removed, before a watch that nobody reads."""
    code = "import os\nn = 0\nwhile True:\n    path = f'/mnt/data/{n:0200}'; open(path, 'w').close(); os.unlink(path); n += 1"
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(box.files.watch("/mnt/data", recursive=True))
        await _run(box, code)


async def displays(box: Sandbox) -> None:
    """Each under a name of its own, which the history remembers for later updates."""
    await _run(
        box,
        "from IPython.display import display, HTML\nn = 0\nwhile True: display(HTML('x'), display_id=f'{n:0500}'); n += 1",
    )


async def growing_displays(box: Sandbox) -> None:
    await _run(
        box,
        "from IPython.display import display, HTML\nshown, n = display(HTML(''), display_id='one'), 1\nwhile True: shown.update(HTML('x' * n)); n += 5000",
    )


async def listings(box: Sandbox) -> None:
    await _run(
        box,
        "import os\nos.makedirs('/tmp/many')\nfor n in range(15_000): os.symlink('x' * 3000, f'/tmp/many/{n:0240}')",
        20,
    )
    for _ in range(3):
        with contextlib.suppress(errors.ClocheError):
            await box.files.list("/tmp/many")


async def unread_commands(box: Sandbox) -> None:
    """In the background, where output that nobody reads does not stop them."""
    started = [await box.commands.start("exec yes " + "x" * 1000, background=True) for _ in range(24)]
    await asyncio.sleep(SECONDS)  # as long as the other floods last
    for process in started:
        process.kill()


async def unread_input(box: Sandbox) -> None:
    process = await box.commands.start("sleep 30", stdin=True, timeout_seconds=30)
    async with process:
        feeding = [asyncio.create_task(process.send_stdin(bytes(4 * MIB))) for _ in range(4)]
        await asyncio.sleep(1)  # time to take all of it, if nothing bounded it
        for task in feeding:
            task.cancel()
        await asyncio.gather(*feeding, return_exceptions=True)


async def cells(box: Sandbox) -> None:
    """One after the other, each with a source and an output that are kept."""
    for number in range(150):
        await _run(box, f"print('x' * 60_000)  # {'y' * 60_000} {number}")


async def contexts(box: Sandbox) -> None:
    for _ in range(20):
        context = await box.create_context()
        await context.execute("held = bytearray(1 << 20)").result()
        box.remove_context(context.id)


async def connections(box: Sandbox) -> None:
    """To a program that accepts none, and to one that closes each at once."""
    code = "import socket, threading\nserver = socket.create_server(('', 8000)); quiet = socket.create_server(('', 8001), backlog=1)\ndef serve():\n    while True: server.accept()[0].close()\nthreading.Thread(target=serve, daemon=True).start()"
    await _run(box, code)
    for _ in range(200):
        with contextlib.suppress(errors.ClocheError):
            (await box.connect_port(8000)).close()


async def errors_without_end(box: Sandbox) -> None:
    for _ in range(10):
        await _run(
            box,
            "def f(n):\n    x = 'y' * 100_000\n    if n: return f(n - 1)\n    raise type('E' * 10_000, (Exception,), {})('z' * (20 << 20))\nf(200)",
            5,
        )


async def variables(box: Sandbox) -> None:
    await _run(box, "globals().update({f'v{n:0190}': 'x' * 10_000 for n in range(20_000)})", 20)
    for _ in range(3):
        with contextlib.suppress(errors.ClocheError):
            await box.context().variables()


async def questions(box: Sandbox) -> None:
    """Input that is asked for, with a long prompt, and never given."""
    with contextlib.suppress(errors.ClocheError):
        async with box.context().execute(
            "while True:\n    try: input('x' * 200_000)\n    except BaseException: pass", timeout_seconds=SECONDS
        ) as execution:
            async for _ in execution:
                await asyncio.sleep(0.05)


FLOODS: dict[str, Callable[[Sandbox], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        changes,
        displays,
        growing_displays,
        listings,
        unread_commands,
        unread_input,
        cells,
        contexts,
        connections,
        errors_without_end,
        variables,
        questions,
    )
}
MOST_BYTES = 160 * MIB  # of any one of them; see docs/threat-model.md for what each took


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_of(engine, record_property, flood):
    box = await engine.create(SandboxSpec(limits=LIMITS))
    before, descriptors = held_bytes(), len(os.listdir("/proc/self/fd"))
    try:
        await FLOODS[flood](box)
        grown = held_bytes() - before
    finally:
        await box.kill()
    record_property("held_mib", grown // MIB)
    print(f"{flood}: {grown / MIB:.1f} MiB held, {(held_bytes() - before) / MIB:.1f} after its end")
    assert grown < MOST_BYTES
    async with asyncio.timeout(10):
        while len(os.listdir("/proc/self/fd")) > descriptors + 8:  # the pool may have made a cell meanwhile
            await asyncio.sleep(0.05)
