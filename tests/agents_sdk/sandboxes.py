"""The OpenAI Agents SDK with its own client for E2B, as its users call it. Run by its interpreter; prints JSON.

python sandboxes.py MODEL SNAPSHOTS

MODEL calls the tool `exec_command` once; SNAPSHOTS is a directory for the SDK's own archives. The addresses are in the
environment: E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY, OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import asyncio
import io
import json
import sys
from pathlib import Path

from agents import Agent, CodeInterpreterTool, Runner, set_tracing_disabled
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
from agents.run import RunConfig
from agents.sandbox import LocalSnapshotSpec, Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import File

MODEL, SNAPSHOTS = sys.argv[1:3]
GIVEN = {"given.txt": File(content=b"given")}
CODE_INTERPRETER = {"type": "code_interpreter", "container": {"type": "auto"}}


async def use_session(kind: str, persistence: str) -> dict:
    """One session to its end, and the one that continues it."""
    client = E2BSandboxClient()
    options = E2BSandboxClientOptions(sandbox_type=kind, workspace_persistence=persistence, exposed_ports=(8000,))
    snapshot = LocalSnapshotSpec(base_path=Path(SNAPSHOTS))
    session = await client.create(manifest=Manifest(entries=GIVEN), options=options, snapshot=snapshot)
    async with session:
        done = await session.exec("pwd; id -un; cat given.txt; stat -c ' %U' .")
        await session.write("made/new.txt", io.BytesIO(b"made"))
        port = await session.resolve_exposed_port(8000)
    async with await client.resume(session.state) as again:
        kept = (await again.read("made/new.txt")).read()
    return {"said": done.stdout.decode(), "kept": kept.decode(), "port": [port.host, port.port, port.tls]}


async def run_sandbox_agent() -> str:
    options = E2BSandboxClientOptions(sandbox_type="e2b")
    sandbox = SandboxRunConfig(client=E2BSandboxClient(), options=options)
    agent = SandboxAgent(name="in a sandbox", model=MODEL)
    return (await Runner.run(agent, "6 times 7?", run_config=RunConfig(sandbox=sandbox))).final_output


async def run_echo(model: str) -> str:
    tools = [CodeInterpreterTool(tool_config=CODE_INTERPRETER)]
    return (await Runner.run(Agent(name="echo", model=model, tools=tools), "```python\n6 * 7\n```")).final_output


async def main() -> None:
    set_tracing_disabled(True)
    kinds = [(kind, way) for kind in ("e2b", "e2b_code_interpreter") for way in ("tar", "snapshot")]
    said: dict = {"sessions": [await use_session(*each) for each in kinds]}
    said["agent"] = await run_sandbox_agent()
    said["echo"] = await run_echo("cloche-echo")
    print(json.dumps(said))


asyncio.run(main())
