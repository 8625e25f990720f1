"""Operations by our own library, over `/api/v1`."""

from __future__ import annotations

import asyncio
import hashlib

import cloche
from cloche.events import Ended, Output, Started
from soak.book import Lost, Wrong
from soak.visit import Operation, Visit, check, check_command, check_run, taken

PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()"
LINES = 40


async def text(visit: Visit) -> None:
    """The commonest: a sandbox, a value, another that builds on it."""
    number = visit.number()
    async with visit.sandbox() as box:
        check_run(await box.run(f"x = {number}"))
        await taken(box, "x * 2", number * 2)


async def frame_and_plot(visit: Visit) -> None:
    async with visit.sandbox() as box:
        run = await box.run("import pandas as pd\npd.DataFrame({'x': range(5)}).describe()")
        check_run(run)
        check("mean" in (run.results[0].html or ""), True, "a table's html")
        run = await box.run(PLOT)
        check_run(run)
        check([bool(result.png) for result in run.results], [True], "pictures")


async def error(visit: Visit) -> None:
    async with visit.sandbox() as box:
        run = await box.run("kept = 5\n1 / 0")
        check_run(run, "raised")
        check(run.error and run.error.name, "ZeroDivisionError")
        await taken(box, "kept", 5)


async def interrupted(visit: Visit) -> None:
    """A program that would never end is interrupted, and its namespace lives on."""
    async with visit.sandbox() as box:
        check_run(await box.run("x = 7"))
        ended = None
        async with box.stream("import time\nprint('going', flush=True)\nwhile True: time.sleep(0.01)") as events:
            async for event in events:
                if isinstance(event, Output):
                    await events.interrupt()
                if isinstance(event, Ended):
                    ended = event.outcome
        if ended == "died":
            raise Lost("the program that was to be interrupted")
        check(ended, "interrupted", "outcome")
        await taken(box, "x", 7)


async def timed_out(visit: Visit) -> None:
    async with visit.sandbox() as box:
        check_run(await box.run("import time; time.sleep(60)", timeout=0.3), "timed_out")
        await taken(box, "1 + 1", 2)


async def left_stream(visit: Visit) -> None:
    """Whoever leaves in the middle of a flood leaves a sandbox that answers the next."""
    async with visit.sandbox() as box:
        seen = 0
        async with box.stream("for i in range(10**9): print('x' * 100)") as events:
            async for event in events:
                seen += 1
                check(isinstance(event, Started), seen == 1, "first event")
                if seen > visit.dice.randrange(2, 20):
                    break
        await taken(box, "40 + 2", 42)


async def much_output(visit: Visit) -> None:
    count = visit.dice.randrange(1_000, 200_000)
    async with visit.sandbox() as box:
        run = await box.run(f"import sys\n_ = sys.stdout.write('y' * {count} + '\\n')\nprint('end', file=sys.stderr)")
        check_run(run)
        check((run.stdout, run.stderr), ("y" * count + "\n", "end\n"), "output")


async def files(visit: Visit) -> None:
    content = visit.dice.randbytes(visit.dice.choice([10, 5_000, 300_000, 3_000_000]))
    async with visit.sandbox() as box:
        await box.files.write("/mnt/data/deep/er/a.bin", content)
        digest = hashlib.sha256(content).hexdigest()
        code = "import hashlib; hashlib.sha256(open('deep/er/a.bin', 'rb').read()).hexdigest()"
        await taken(box, code, repr(digest))
        check(await box.files.read("/mnt/data/deep/er/a.bin") == content, True, "the file as it was written")
        check([each.size_bytes for each in await box.files.list("/mnt/data/deep/er")], [len(content)], "sizes")
        await box.files.move("/mnt/data/deep/er/a.bin", "/mnt/data/b.bin")
        await box.files.remove("/mnt/data/b.bin")
        check(await box.files.exists("/mnt/data/b.bin"), False, "a removed file's existence")


async def commands(visit: Visit) -> None:
    async with visit.sandbox() as box:
        number = visit.number()
        ran = await box.commands.run(f"echo {number}; echo no >&2; exit 3")
        check_command(ran, (str(number), "no", 3))
        check_command(await box.commands.run("wc -c", stdin="x" * number), (str(number), "", 0))
        process = await box.commands.run("cat; sleep 600", background=True, stdin=True)
        await process.send_stdin("through\n")
        async for event in process:
            check(getattr(event, "data", None) or getattr(event, "text", None), "through\n", "what cat says")
            break
        await process.kill()
        check((await process.wait()).exit_code != 0, True, "that a killed command failed")


async def contexts(visit: Visit) -> None:
    async with visit.sandbox() as box:
        other = await box.contexts.create(cwd="/tmp")
        check_run(await box.run("x = 1"))
        check_run(await other.run("x = 2"), "ok")
        await taken(box, "x", 1)
        await taken(other, "x", 2)
        shell = await box.contexts.create("bash")
        run = await shell.run("echo $((6 * 7))")
        check_run(run)
        check(run.stdout, "42\n")
        await other.restart()
        check_run(await other.run("x"), "raised")
        await box.contexts.remove(other)
        check(len(await box.contexts.list()), 2, "contexts")


async def pause_with_memory(visit: Visit) -> None:
    async with visit.sandbox() as box:
        number = visit.number()
        check_run(await box.run(f"x = {number}"))
        await box.pause()
        check((await box.info()).state, "paused")
        await box.resume()
        await taken(box, "x", number)


async def pause_without_memory(visit: Visit) -> None:
    async with visit.sandbox() as box:
        number = visit.number()
        check_run(await box.run(f"_ = open('kept', 'w').write('{number}')"))
        await box.pause(memory=False)
        again = await cloche.AsyncSandbox.connect(box.id, **visit.server)
        await taken(again, "int(open('kept').read())", number)


async def snapshot_and_fork(visit: Visit) -> None:
    number, snapshots = visit.number(), cloche.AsyncSnapshots(**visit.server)
    async with visit.sandbox() as box:
        await box.files.write("/mnt/data/kept", str(number))
        snapshot = await box.snapshot(visit.name())
        try:
            async with visit.sandbox(snapshot.id) as made:
                await taken(made, "int(open('/mnt/data/kept').read())", number)
        finally:
            await snapshots.remove(snapshot)
        for fork in await box.fork(2, timeout=60):
            await taken(fork, "int(open('/mnt/data/kept').read())", number)
            await fork.close()


async def branches(visit: Visit) -> None:
    async with visit.sandbox() as box:
        context = await box.contexts.get()
        check_run(await context.run("x = [1]"))
        mark = await context.checkpoint()
        check_run(await context.run("x.append(2)"))
        await context.rollback(mark)
        await taken(context, "x", [1])
        for number, each in enumerate(await context.fork(2)):
            check_run(await each.run(f"x.append({number + 10})"))
            await taken(each, "x", [1, number + 10])
        await taken(context, "x", [1])
        await context.forget(mark)


async def detached(visit: Visit) -> None:
    """A run that is left and found again: every event once, in order."""
    async with visit.sandbox() as box:
        code = f"import time\nfor i in range({LINES}):\n    print(i, flush=True)\n    time.sleep(0.005)"
        run = await box.run(code, detach=True)
        try:
            said, seen = "", 0
            async with run.events() as events:
                async for event in events:
                    said += event.text if isinstance(event, Output) else ""
                    seen += 1
                    if seen > visit.dice.randrange(1, 10):
                        break
            again = await cloche.AsyncDetachedRun.connect(run.id, **visit.server)
            async for event in again.events(after=run.last_event):
                said += event.text if isinstance(event, Output) else ""
            outcome = (await again.info()).outcome
            if outcome == "died":
                raise Lost("a detached run")
            check((outcome, said), ("ok", "".join(f"{number}\n" for number in range(LINES))), "detached run")
        finally:
            await run.remove()


async def volume(visit: Visit) -> None:
    volumes, number = cloche.AsyncVolumes(**visit.server), visit.number()
    made = await volumes.create(visit.name())
    try:
        async with visit.sandbox(volumes={"/mnt/v": made}) as box:
            check_run(await box.run(f"_ = open('/mnt/v/a', 'w').write('{number}')"))
        async with visit.sandbox(volumes={"/mnt/v": made}) as box:
            check(await box.files.read("/mnt/v/a"), str(number).encode(), "what is in the volume")
    finally:
        await volumes.remove(made)


async def tools(visit: Visit) -> None:
    """Code in the sandbox calls a function of ours."""
    number = visit.number()

    async def add(x: int) -> int:
        """Adds one."""
        await asyncio.sleep(0.01)
        return x + 1

    async with visit.sandbox() as box:
        run = await box.run(f"await add({number})", tools=[add])
        check_run(run)
        check(run.text, str(number + 1), "a tool's answer")


async def nonsense(visit: Visit) -> None:
    """What makes no sense gets a clear error, and what comes next is as if nothing was."""
    async with visit.sandbox() as box:
        # Functions, not coroutines: where the sandbox is lost at the first, nobody would await the others.
        asks = (box.files.read, "/mnt/data/none"), (box.contexts.create, "klingon"), (box.contexts.get, "none")
        for ask, what in asks:
            try:
                await ask(what)
            except (cloche.errors.InvalidRequest, cloche.errors.FileNotFound, cloche.errors.ContextNotFound):
                continue
            raise Wrong("nonsense was accepted")
        await taken(box, "2 + 2", 4)


OPERATIONS: dict[Operation, int] = {
    text: 10,
    frame_and_plot: 4,
    error: 3,
    interrupted: 3,
    timed_out: 2,
    left_stream: 3,
    much_output: 3,
    files: 4,
    commands: 3,
    contexts: 2,
    pause_with_memory: 2,
    pause_without_memory: 2,
    snapshot_and_fork: 2,
    branches: 2,
    detached: 3,
    volume: 2,
    tools: 2,
    nonsense: 2,
}
"""How often, beside each other."""
