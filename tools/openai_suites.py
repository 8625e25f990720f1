"""Runs public suites of OpenAI's API, unmodified, against a `cloche serve` of this checkout.

    make openai-suite OPENRESPONSES_REPO=path/to/openresponses

The Open Responses compliance tests come from the checkout, llm-comply from the package index. Neither knows the code
interpreter: they test the gateway's protocol. The model behind it is the scripted one of tests/openai, which answers
with text, or with a call where the request offers a function and has no output of one yet; in both styles.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
sys.path.insert(0, str(HERE))

from tests.conftest import DATA_DIR, serving  # noqa: E402
from tests.openai.upstream import Function, ScriptedUpstream, Text  # noqa: E402

PACKAGES = ["tsx@^4", "zod@^3.25.76"]
LLM_COMPLY = "llm-comply==0.5.0"
CONFIG = """
[[upstream]]
models = ["resp-*"]
base_url = "{url}"
api = "responses"

[[upstream]]
models = ["chat-*"]
base_url = "{url}"
api = "chat"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openresponses-repo", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, ScriptedUpstream() as upstream:
        work = Path(place)
        suite = prepared(given.openresponses_repo, work / "openresponses")
        config = work / "cloche.toml"
        config.write_text(CONFIG.format(url=upstream.url))
        with serving(DATA_DIR, env={"CLOCHE_CONFIG": str(config)}) as server:
            for model in ("resp-suite", "chat-suite"):
                upstream.script(model, leg)
                place_and_key = ["-u", f"{server.url}/v1", "-k", server.key, "-m", model]
                open_responses(suite, model, place_and_key)
                for format in ("open-responses", "openai-chat"):
                    llm_comply(model, format, place_and_key)


def leg(body: dict[str, Any]) -> list[Any]:
    """What the model says: a call, if there is a function to call and none was called yet."""
    tools = [tool.get("function", tool) for tool in body.get("tools") or []]
    if tools and "call_id" not in json.dumps(body):
        return [Function(tools[0]["name"], {"location": "San Francisco, CA"})]
    return [Text("Hello from the scripted model. 1, 2, 3, 4, 5.")]


def prepared(repo: Path, work: Path) -> Path:
    """A copy of the suite's own files, with the two packages that it needs."""
    for name in ("bin", "src"):
        shutil.copytree(repo / name, work / name)
    (work / "package.json").write_text('{"private": true, "type": "module"}')
    install = ["npm", "install", "--no-audit", "--no-fund", "--silent", *PACKAGES]
    subprocess.run(install, cwd=work, env=env(), check=True)
    return work


def env() -> dict[str, str]:
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "PATH": path, "NODE_USE_SYSTEM_CA": "1"}


def open_responses(suite: Path, model: str, place: list[str]) -> None:
    command = ["npx", "tsx", "bin/compliance-test.ts", *place, "--json"]
    done = subprocess.run(command, cwd=suite, env=env(), capture_output=True, text=True, timeout=600)
    found = re.search(r"\{.*\}", done.stdout, re.DOTALL)
    if found is None:
        sys.exit(f"the Open Responses suite did not run:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    print(f"\nOpen Responses, {model}")
    for result in json.loads(found[0])["results"]:
        why = "; ".join(map(str, result.get("errors") or []))
        print(f"  {result['status']:8} {result['id']} {why[:300]}")


def llm_comply(model: str, format: str, place: list[str]) -> None:
    command = ["uv", "tool", "run", "--from", LLM_COMPLY, "llm-comply", *place, "--format", format]
    done = subprocess.run(command, env=env(), capture_output=True, text=True, timeout=600)
    print(f"\nllm-comply {format}, {model}\n{done.stdout[-6000:]}{done.stderr[-1000:]}")


if __name__ == "__main__":
    main()
