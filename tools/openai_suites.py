"""Runs public suites of OpenAI's API, unmodified, against a `cloche serve` of this checkout.

    make openai-suite [OPENRESPONSES_REPO=path] [OPENAI_REPO=path] [LITELLM_REPO=path]

Each checkout that is given brings its part:

- openresponses: its compliance tests, and llm-comply from the package index. Neither knows the code interpreter: they
  test the gateway's protocol.
- openai-python: its tests of the resources that the gateway has, with the released client. They name things by ids that
  only a mock knows, so they run twice: as they are, and behind openai_known_ids.py, which makes those things.
- litellm: its live test of containers, with the released LiteLLM.

The model is the scripted one of tests/openai, which answers with text, or with a call where the request offers a
function and has no output of one yet; in both styles.
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
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
sys.path.insert(0, str(HERE))

from tests.conftest import DATA_DIR, RunningServer, serving  # noqa: E402
from tests.openai.upstream import Function, ScriptedUpstream, Text  # noqa: E402
from tools.openai_known_ids import knowing_ids  # noqa: E402

PACKAGES = ["tsx@^4", "zod@^3.25.76"]
LLM_COMPLY = "llm-comply==0.5.0"
CLIENT = ["openai[aiohttp]==3.49.0", "pytest", "pytest-asyncio", "pytest-timeout", "rich"]
LITELLM = ["-r", "tests/litellm/requirements.txt", "--override", "tests/litellm/overrides.txt", "pytest"]
RESOURCES = [
    *("test_containers.py", "containers", "test_files.py", "test_models.py"),
    *("test_conversations.py", "conversations", "test_responses.py", "responses"),
]
PER_TEST_SECONDS = 60
MODELS = ["resp-suite", "chat-suite", "gpt-4o-mini", "gpt-5.1", "gpt-5.6-sol"]  # those with gpt are openai-python's
CONFIG = """
[[upstream]]
models = ["resp-*"]
base_url = "{url}"
api = "responses"

[[upstream]]
models = ["chat-*"]
base_url = "{url}"
api = "chat"

[[upstream]]
models = ["gpt-*"]
base_url = "{url}"
api = "responses"
"""


def main() -> None:
    given = arguments()
    with tempfile.TemporaryDirectory() as place, ScriptedUpstream() as upstream:
        work = Path(place)
        config = work / "cloche.toml"
        config.write_text(CONFIG.format(url=upstream.url))
        for model in MODELS:
            upstream.script(model, leg)
        settings, log = {"CLOCHE_CONFIG": str(config)}, work / "server.log"
        with serving(DATA_DIR, env=settings, log=log) as server:
            if given.openresponses_repo:
                protocol(given.openresponses_repo, work, server)
            if given.litellm_repo:
                litellm(given.litellm_repo, given.work, work, server)
        if given.openai_repo:
            # The tests' key is "My API Key", which no server gives.
            with serving(DATA_DIR, "--insecure-no-auth", env=settings, log=log) as server:
                resources(given.openai_repo, given.work, work, server)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openresponses-repo", type=Path, help="a checkout of openresponses")
    parser.add_argument("--openai-repo", type=Path, help="a checkout of openai-python")
    parser.add_argument("--litellm-repo", type=Path, help="a checkout of litellm")
    parser.add_argument("--work", type=Path, default=HERE / ".suites", help="where environments are made and kept")
    given = parser.parse_args()
    if not (given.openresponses_repo or given.openai_repo or given.litellm_repo):
        parser.error("give at least one checkout")
    return given


def leg(body: dict[str, Any]) -> list[Any]:
    """What the model says: a call, if there is a function to call and none was called yet."""
    tools = [tool.get("function", tool) for tool in body.get("tools") or []]
    if tools and "call_id" not in json.dumps(body):
        return [Function(tools[0]["name"], {"location": "San Francisco, CA"})]
    return [Text("Hello from the scripted model. 1, 2, 3, 4, 5.")]


# -- openresponses


def protocol(repo: Path, work: Path, server: RunningServer) -> None:
    suite = prepared(repo, work / "openresponses")
    for model in ("resp-suite", "chat-suite"):
        place_and_key = ["-u", f"{server.url}/v1", "-k", server.key, "-m", model]
        open_responses(suite, model, place_and_key)
        for format in ("open-responses", "openai-chat"):
            llm_comply(model, format, place_and_key)


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


# -- openai-python and litellm


def resources(repo: Path, environments: Path, work: Path, server: RunningServer) -> None:
    python = environment(environments / "openai-python", CLIENT)
    # Without the checkout's own options, which want a process per core and the client of the same commit.
    tests = ["-o", "addopts=", f"--timeout={PER_TEST_SECONDS}", *(f"tests/api_resources/{name}" for name in RESOURCES)]
    with knowing_ids(server.url) as known:
        for title, url in (("as it is", server.url), ("its ids made", known)):
            report = pytest(python, repo, tests, {"TEST_API_BASE_URL": f"{url}/v1"}, work / "openai.xml")
            tell(f"openai-python, {title}", report)


def litellm(repo: Path, environments: Path, work: Path, server: RunningServer) -> None:
    python = environment(environments / "litellm", LITELLM)
    # Away from the checkout: its conftest.py plays recorded answers, its sources would be imported.
    shutil.copy(repo / "tests/llm_translation/test_containers_api.py", work)
    place = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key}
    settings = {**place, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    tell("litellm", pytest(python, work, ["test_containers_api.py"], settings, work / "litellm.xml"))


def environment(directory: Path, packages: list[str]) -> Path:
    """The Python of an environment with these packages."""
    python = directory.resolve() / "bin/python"
    uv = str(BIN / "uv")
    if not python.exists():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, directory], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *packages], cwd=HERE, check=True)
    return python


def pytest(python: Path, directory: Path, words: list[str], settings: dict[str, str], report: Path) -> Path:
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *words]
    report.unlink(missing_ok=True)
    done = subprocess.run(command, cwd=directory, env={**env(), **settings}, capture_output=True, text=True)
    if not report.exists() or done.returncode > 1:  # 1: some tests failed
        sys.exit(f"pytest did not run:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return report


def tell(title: str, report: Path) -> None:
    """Says how many passed of each file, and why the others did not."""
    counts: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        end = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        kind = "passed" if end is None else "skipped" if end.tag == "skipped" else "failed"
        file = ".".join(part for part in str(case.get("classname")).split(".") if not part.startswith("Test"))
        counts.setdefault(file, Counter())[kind] += 1
        if end is not None:
            reasons[f"{kind}: {(end.get('message') or '')[:240]}"] += 1
    print(f"\n{title}: {dict(sum(counts.values(), Counter()))}")
    for name, count in counts.items():
        print(f"  {name}: {dict(count)}")
    for reason, times in reasons.most_common():
        print(f"  {times:4} {reason}")


if __name__ == "__main__":
    main()
