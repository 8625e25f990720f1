"""LiteLLM's example of its interceptor, by its SDK. Run by LiteLLM's interpreter; prints JSON.

python interceptor.py PROVIDER API_BASE KEY MODEL_URL RESPONSES_MODEL CHAT_MODEL
"""

import asyncio
import json
import sys

from litellm.integrations.code_interpreter_interception.handler import CodeInterpreterInterceptionLogger
from litellm.sandbox.sandbox_tools import register_sandbox_tools

import litellm

PROVIDER, BASE, KEY, MODEL_URL, RESPONSES_MODEL, CHAT_MODEL = sys.argv[1:]
PLACE = {"api_base": MODEL_URL, "api_key": "none"}
CODE_INTERPRETER = {"type": "code_interpreter", "container": {"type": "auto"}}
QUESTION = "Product of first 6 primes. Just the number."


async def main() -> None:
    params = {"sandbox_provider": PROVIDER, "api_base": BASE, "api_key": KEY}
    register_sandbox_tools([{"sandbox_tool_name": "ours", "litellm_params": params}])
    litellm.callbacks = [CodeInterpreterInterceptionLogger(sandbox_tool_name="ours")]
    response = await litellm.aresponses(
        model=f"openai/{RESPONSES_MODEL}", tools=[CODE_INTERPRETER], input=QUESTION, **PLACE
    )
    call = response.model_dump()["output"][0]
    messages = [{"role": "user", "content": QUESTION}]
    chat = await litellm.acompletion(model=f"openai/{CHAT_MODEL}", tools=[CODE_INTERPRETER], messages=messages, **PLACE)
    said = {"call": call, "text": response.output_text, "chat": chat.choices[0].message.content}
    print(json.dumps(said))


asyncio.run(main())
