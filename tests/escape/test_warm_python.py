"""The socket of `python3`: whatever comes in, init goes on, nobody becomes another, and there is always a Python."""

from __future__ import annotations

import pytest

from cloche.engine.sandboxes.sandbox import Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="session")

CLIENT = r"""
import array, json, os, socket, struct, subprocess, sys, time
def connect():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0cloche-python")
    connection.settimeout(30)
    return connection
def frame(head, body=b""):
    data = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack(">II", len(data), len(body)) + data + body
here = os.open(".", os.O_PATH)
good = {"kind": "command", "uid": os.getuid(), "rest": 1, "words": 2, "env": 0, "numbers": [], "fds": 4}
code = b"-c\0print(open('/proc/self/status').read())\0-c\0x"
def answer(head, body=code, fds=(0, 1, 2, here)):
    with connect() as connection:
        try:
            socket.send_fds(connection, [frame(head, body)], fds)
            return connection.recv(4096)[8:].decode()
        except OSError as error:
            return type(error).__name__
"""


async def said(box: Sandbox, code: str, user: str = "user") -> str:
    command = "exec /opt/cloche/env/bin/python3 -"
    result = await box.commands.run(command, user=user, stdin=CLIENT + code, timeout_seconds=90)
    assert result.exit_code == 0, result
    return result.stdout


async def test_nonsense_is_refused(box: Sandbox):
    code = """
wrong = [
    answer(b"not json"), answer(b"[]"), answer({}), answer(good, b""), answer(good, code + b"\\0"),
    answer(good, fds=[0]),
    answer({**good, "kind": "x"}), answer({**good, "uid": 0 if os.getuid() else 1000}), answer({**good, "uid": None}),
    answer({**good, "rest": -1}), answer({**good, "words": 1 << 70}), answer({**good, "env": "1"}),
    answer({**good, "rest": True}), answer({**good, "numbers": [1]}, fds=[0, 1, 2, here, 0]),
    answer({**good, "numbers": [5, 5], "fds": 6}, fds=[0, 1, 2, here, 0, 0]), answer({**good, "numbers": [1 << 40]}),
    answer({**good, "numbers": list(range(3, 99))}), answer({**good, "numbers": {}}), answer({**good, "fds": 99}),
    answer({**good, "kind": "file"}), answer({**good, "env": 1}, code + b"\\0=x"), answer(good, fds=[0, 1, 2, 0]),
    answer({**good, "numbers": [60000], "fds": 5}, fds=[0, 1, 2, here, 0]),
]
print(len(wrong), [each for each in wrong if "started" in each])
print(answer(good).startswith('{"error":'), subprocess.run(["python3", "-c", "print(7)"]).returncode)
"""
    assert await said(box, code) == "7\n23 []\nTrue 0\n"


async def test_a_silent_client_blocks_no_other_python(box: Sandbox):
    code = """
held = [connect() for _ in range(80)]
for connection in held[:10]:
    connection.send(b"\\0\\0")
done = subprocess.run(["python3", "-c", "print(6 * 7)"], capture_output=True, text=True)
print(done.stdout + done.stderr, end="")
"""
    assert await said(box, code) == "42\n"
    assert (await box.commands.run("echo here")).stdout == "here\n"


async def test_dropped_rights_do_not_come_back(box: Sandbox):
    """Root leaves its group, and then runs `python3`: filters and bounding sets cannot be changed in a sandbox."""
    code = """
def groups(lines):
    return [line for line in lines if line.startswith(("Gid", "Groups"))]
before = groups(open("/proc/self/status"))
os.setgroups([])
os.setresgid(1000, 1000, 1000)
own = groups(open("/proc/self/status"))
look = "print(open('/proc/self/status').read())"
child = subprocess.run(["python3", "-c", look], capture_output=True, text=True).stdout
print(own != before, groups(child.splitlines(True)) == own)
"""
    assert await said(box, code, "root") == "True True\n"


@pytest.mark.long
async def test_a_flood_of_connections_leaves_nothing_behind(box: Sandbox):
    code = """
for _ in range(300):
    connect().close()
program = ["python3", "-c", "import sys; print('pandas' in sys.modules)"]
end = time.monotonic() + 20
while time.monotonic() < end:
    if subprocess.run(program, capture_output=True).stdout == b"True\\n":
        print("warm again")
        break
"""
    assert await said(box, code) == "warm again\n"
    count = await box.commands.run("ls -d /proc/[0-9]* | wc -l")
    assert int(count.stdout) < 10
