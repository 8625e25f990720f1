"""LiteLLM's own functions with its provider `e2b` at another server. Run by LiteLLM's interpreter; prints JSON.

python e2b_sandboxes.py API_BASE KEY
"""

import asyncio
import json
import sys

import litellm

ONCE = {"provider": "e2b"}
PROVIDER = {**ONCE, "api_base": sys.argv[1], "api_key": sys.argv[2]}


async def main() -> None:
    box = await litellm.acreate_sandbox(**PROVIDER)
    runs = [await litellm.arun_code(container=box, code=code, **ONCE) for code in ("x = 6\nprint(x * 7)\nx", "1/0")]
    deleted = [await litellm.adelete_sandbox(container=box, **ONCE) for _ in range(2)]
    tool = await litellm.acode_interpreter_tool(code="print(sum(range(10)))", **PROVIDER)
    said = {"id": box.id, "domain": box.domain, "deleted": deleted, "tool": tool.model_dump()}
    print(json.dumps({**said, "runs": [run.model_dump() for run in runs]}))


asyncio.run(main())
