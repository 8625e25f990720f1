"""The socket of `sudo`: whatever comes in, init goes on, and no command is left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

CLIENT = """
import array, json, os, socket, struct, sys, time
def connect():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("/run/cloche-sudo")
    connection.settimeout(30)
    return connection
def frame(value):
    data = json.dumps(value).encode()
    return struct.pack(">II", len(data), 0) + data
def start(argv):
    connection = connect()
    order = {"argv": argv, "user": "root", "cwd": "/", "env": {}, "fds": 3}
    socket.send_fds(connection, [frame(order)], [0, 1, 2])
    assert b"started" in connection.recv(4096)
    return connection
def running(argv):
    command = "\\0".join(argv).encode() + b"\\0"
    return any(read(pid) == command for pid in os.listdir("/proc") if pid.isdigit())
def read(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
def until(true):
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.02)
"""


@pytest_asyncio.fixture(loop_scope="session")
async def elevated(engine: Engine) -> AsyncIterator[Sandbox]:
    sandbox = await engine.create(SandboxSpec(sudo=True))
    yield sandbox
    await sandbox.kill()


async def said(box: Sandbox, code: str, seconds: float = 60) -> str:
    result = await box.commands.run("exec python3 -", stdin=CLIENT + code, timeout_seconds=seconds)
    assert result.exit_code == 0, result
    return result.stdout


@pytest.mark.parametrize("nonsense", ["{'fds': 99}", "{'fds': -1}", "{'fds': 'x'}", "{'fds': 1.5}", "{'signal': 9}"])
async def test_a_client_that_says_nonsense_loses_its_command(elevated: Sandbox, nonsense: str):
    code = f"""
argv = ["sleep", "77"]
connection = start(argv)
until(lambda: running(argv))
connection.sendall(frame({nonsense}))
until(lambda: not running(argv))
print("gone")
"""
    assert await said(elevated, code) == "gone\n"


async def test_background_processes_of_a_command_outlive_it(elevated: Sandbox):
    code = """
connection = start(["sh", "-c", "sleep 78 & exit 3"])
said = b""
while b'"status":768' not in said:
    piece = connection.recv(4096)
    assert piece, said
    said += piece
time.sleep(0.2)
print(running(["sleep", "78"]))
"""
    assert await said(elevated, code) == "True\n"


@pytest.mark.long
async def test_a_request_that_comes_byte_by_byte_has_one_time_limit(elevated: Sandbox):
    code = """
connection, began = connect(), time.monotonic()
try:
    for byte in frame({"argv": ["id"], "x": "y" * 1000}):
        connection.send(bytes([byte]))
        time.sleep(0.5)
except OSError:
    pass
print(time.monotonic() - began < 20)
"""
    assert await said(elevated, code) == "True\n"


async def test_one_client_too_many_is_told_so(elevated: Sandbox):
    code = """
import subprocess
held = [connect() for _ in range(32)]
done = subprocess.run(["sudo", "id"], capture_output=True, text=True)
print(done.returncode, done.stderr, end="")
for connection in held:
    connection.close()
until(lambda: subprocess.run(["sudo", "true"], capture_output=True).returncode == 0)
print("again")
"""
    expected = "1 sudo: 32 commands run by sudo already: wait until one has ended\nagain\n"
    assert await said(elevated, code) == expected
