"""LiteLLM's own functions for sandboxes, called as its users call them. Run by LiteLLM's interpreter; prints JSON.

python sandboxes.py API_BASE KEY
"""

import asyncio
import json
import sys

import httpx

import litellm

BASE, KEY = sys.argv[1:3]
PROVIDER = {"provider": "opensandbox", "api_base": BASE, "api_key": KEY}
ONCE = {"provider": "opensandbox"}
FAILING = "print(x)\nimport sys\nprint('e', file=sys.stderr)\n1/0"


async def main() -> None:
    said = {}
    box = await litellm.acreate_sandbox(**PROVIDER)
    said["id"] = box.id
    first = await litellm.arun_code(container=box, code="x = 6\nprint(x * 7)\nx", **ONCE)
    second = await litellm.arun_code(container=box, code=FAILING, **ONCE)
    by_id = await litellm.arun_code(container=box.id, code="print(x)", **PROVIDER)
    shell = await litellm.arun_code(container=box, code="echo $((6 * 7))", language="bash", **ONCE)
    said["runs"] = [run.model_dump() for run in (first, second, by_id, shell)]
    said["deleted"] = [await litellm.adelete_sandbox(container=box, **ONCE) for _ in range(2)]
    tool = await litellm.acode_interpreter_tool(code="print(sum(range(10)))", **PROVIDER)
    said["tool"] = tool.model_dump()
    said["open"] = await failure(litellm.acreate_sandbox(network_policy={"defaultAction": "allow"}, **PROVIDER))
    said["unknown"] = await failure(litellm.acreate_sandbox(template="no-such", **PROVIDER))
    print(json.dumps(said))


async def failure(call) -> str:
    try:
        await call
    except httpx.HTTPStatusError as error:
        return error.response.text
    return "it did not fail"


asyncio.run(main())
