"""Runs OpenSandbox's own end-to-end tests, from a checkout that you give, against a `cloche serve` of this checkout.

    make opensandbox-suite OPENSANDBOX_REPO=path/to/OpenSandbox [SUITES="P J C"] [MATCH=expression]

P tests/python, with the released clients; without the tests of client-side pools, which need an older client. J
tests/javascript, with the released client, and the code interpreter of the checkout, which npm does not have. Nothing
of theirs is changed. Their tests of the network want pypi.org and www.github.com: `make` runs them in a little internet
(e2b_world.py), as root. Before them the volumes that they expect are filled, by their own client. C every command of
the released command line `osb` that asks the server, once each.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2b_suite import HERE, PYTEST, Outcome, Suite, free_port, make_python_environment, run_suite, serve

CLIENTS = [
    "opensandbox==1.1.1",
    "opensandbox-code-interpreter==1.1.1",
    "opensandbox-cli==1.1.1",
    "pytest-order",
    "redis<6",
]
PYTHON_TESTS = ("code_interpreter_e2e", "sandbox_e2e", "sandbox_manager_e2e", "credential_vault_e2e")
JS_CLIENT = "@alibaba-group/opensandbox@0.1.11"
JS_CONFIG = """\
import { defineConfig } from 'vitest/config'
import { fileURLToPath } from 'node:url'
const interpreter = fileURLToPath(new URL('interpreter/index.ts', import.meta.url))
const alias = { '@alibaba-group/opensandbox-code-interpreter': interpreter }
export default defineConfig({
  resolve: { alias },
  test: { environment: 'node', testTimeout: 120000, hookTimeout: 120000, env: process.env, fileParallelism: false },
})
"""
PER_TEST_SECONDS = 180
CLAIM, HOST_DIRECTORY = "opensandbox-e2e-pvc-test", "/tmp/opensandbox-e2e/host-volume-test"
FILL = f"""
import os
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.models.sandboxes import Host, PVC, Volume
domain, key = os.environ["OPENSANDBOX_TEST_DOMAIN"], os.environ["OPENSANDBOX_TEST_API_KEY"]
connection = ConnectionConfigSync(domain=domain, api_key=key)
volumes = [
    Volume(name="claim", pvc=PVC(claimName="{CLAIM}"), mountPath="/mnt/claim"),
    Volume(name="host", host=Host(path="{HOST_DIRECTORY}"), mountPath="/mnt/host"),
]
box = SandboxSync.create("opensandbox/code-interpreter:latest", connection_config=connection, volumes=volumes)
box.files.write_file("/mnt/host/marker.txt", "opensandbox-e2e-marker", mode=644)
box.files.write_file("/mnt/claim/marker.txt", "pvc-marker-data", mode=644)
box.files.write_file("/mnt/claim/datasets/train/marker.txt", "pvc-subpath-marker", mode=644)
box.kill()
"""


def main() -> None:
    asked = _arguments()
    asked.work.mkdir(parents=True, exist_ok=True)
    suites = [SUITES[name](asked) for name in asked.suites if name in SUITES]
    if asked.prepare:
        return
    lines: list[str] = []
    with _server(asked) as environment:
        python = make_python_environment(asked.work / "opensandbox", [*CLIENTS, *PYTEST])
        subprocess.run([python, "-c", FILL], env=environment, check=True)
        for suite in suites:
            outcome = run_suite(suite, environment)
            lines += _told(suite.name, outcome)
            (asked.work / f"{suite.name}.failed").write_text("".join(f"{each}\n" for each in sorted(outcome.failed)))
        if "C" in asked.suites:
            lines += _told("C", _run_commands(python.with_name("osb"), asked.work.resolve(), environment))
    print("\n".join(lines))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repo", type=Path, required=True, help="a checkout of OpenSandbox")
    parser.add_argument("--work", type=Path, default=HERE / ".suites", help="where environments are made")
    parser.add_argument("--suites", nargs="+", default=["P", "J", "C"], choices=["P", "J", "C"])
    parser.add_argument("--match", default="", help="only tests whose names match (pytest's -k, vitest's -t)")
    parser.add_argument("--prepare", action="store_true", help="make environments, and run nothing")
    parser.add_argument("--port", type=int, help="where its server listens")
    parser.add_argument("--url", help="a server that runs already, with CLOCHE_API_KEY set to its key")
    return parser.parse_args()


def _python_suite(asked: argparse.Namespace) -> Suite:
    python = make_python_environment(asked.work / "opensandbox", [*CLIENTS, *PYTEST])
    directory, report = asked.repo.resolve() / "tests/python", asked.work.resolve() / "P.xml"
    files = [f"tests/test_{name}{end}.py" for name in PYTHON_TESTS for end in ("", "_sync")]
    found = [each for each in files if (directory / each).exists()]
    options = ["-q", "-o", "addopts=--asyncio-mode=auto --order-scope=class", "-o", "log_cli=false"]
    match = ["-k", asked.match] if asked.match else []
    pytest = [str(python.with_name("pytest")), *options, f"--timeout={PER_TEST_SECONDS}", "--show-capture=no"]
    return Suite("P", directory, [*pytest, f"--junitxml={report}", *match, *found], report)


def _js_suite(asked: argparse.Namespace) -> Suite:
    directory, report = asked.work.resolve() / "js-opensandbox", asked.work.resolve() / "J.xml"
    if not (directory / "node_modules").exists():
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "init", "-y"], cwd=directory, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["npm", "install", "--silent", "vitest@^4.1", JS_CLIENT], cwd=directory, check=True)
    shutil.copytree(asked.repo / "tests/javascript/tests", directory / "tests", dirs_exist_ok=True)
    shutil.copytree(asked.repo / "sdks/code-interpreter/javascript/src", directory / "interpreter", dirs_exist_ok=True)
    (directory / "vitest.config.mts").write_text(JS_CONFIG)
    match = ["-t", asked.match] if asked.match else []
    reporters = ["--reporter=default", "--reporter=junit", f"--outputFile.junit={report}"]
    return Suite("J", directory, ["npx", "vitest", "run", *reporters, *match], report)


OSB = """\
sandbox list
sandbox get BOX
sandbox health BOX
sandbox metrics BOX
sandbox endpoint BOX --port 8000
sandbox renew BOX --timeout 20m
command run BOX -o raw -- true
command status BOX COMMAND
command logs BOX COMMAND
command interrupt BOX COMMAND
command session create BOX
command session run BOX SESSION -o raw -- pwd
command session delete BOX SESSION
file mkdir BOX /tmp/d
file write BOX /tmp/d/a.txt -c hello
file cat BOX /tmp/d/a.txt
file upload BOX up.txt /tmp/d/up.txt
file download BOX /tmp/d/up.txt down.txt
file info BOX /tmp/d/up.txt
file chmod BOX /tmp/d/up.txt --mode 600
file replace BOX /tmp/d/a.txt --old hello --new bye
file search BOX /tmp/d --pattern *.txt
file mv BOX /tmp/d/a.txt /tmp/d/b.txt
file rm BOX /tmp/d/b.txt
file rmdir BOX /tmp/d
egress get BOX
egress patch BOX --rule allow=pypi.org
snapshot create BOX --name osb
snapshot list
snapshot get osb
snapshot delete osb
template list
template get python
template create --image python:3.12 --publish s3://any
template delete python
diagnostics events BOX --scope all
diagnostics logs BOX --scope all
credential-vault create BOX --file vault.json
credential-vault get BOX
credential-vault credential list BOX
credential-vault credential get BOX t
credential-vault binding list BOX
credential-vault binding get BOX b
credential-vault patch BOX --file change.json
credential-vault delete BOX
sandbox pause BOX
sandbox resume BOX
sandbox kill BOX
"""
BINDING = {"name": "b", "match": {"hosts": ["pypi.org"]}, "auth": {"type": "bearer", "credential": "t"}}


def _run_commands(osb: Path, place: Path, environment: dict[str, str]) -> Outcome:
    """Passed are the commands with the exit status 0."""
    own = {"OPEN_SANDBOX_DOMAIN": environment["OPENSANDBOX_TEST_DOMAIN"], "HOME": str(place)}
    own["OPEN_SANDBOX_API_KEY"] = environment["OPENSANDBOX_TEST_API_KEY"]
    vault = {"credentials": [{"name": "t", "source": {"value": "secret"}}], "bindings": [BINDING]}
    (place / "vault.json").write_text(json.dumps(vault))
    (place / "change.json").write_text(json.dumps({"bindings": {"delete": ["b"]}}))
    (place / "up.txt").write_text("up")

    def run(words: str) -> subprocess.CompletedProcess[str]:
        command = [str(osb), *words.split()]
        return subprocess.run(command, cwd=place, env={**environment, **own}, capture_output=True, text=True)

    box = json.loads(run("sandbox create --image python:3.12 --timeout 10m -o json").stdout)["id"]
    started = json.loads(run(f"command run {box} --background -o json -- sleep 600").stdout)["execution_id"]
    session = json.loads(run(f"command session create {box} -o json").stdout)["session_id"]
    outcome = Outcome({"sandbox create", "command run --background"}, set(), set())
    for line in OSB.splitlines():
        words = line.replace("BOX", box).replace("COMMAND", started).replace("SESSION", session)
        (outcome.failed if run(words).returncode else outcome.passed).add(line)
    return outcome


SUITES = {"P": _python_suite, "J": _js_suite}


def _told(name: str, outcome: Outcome) -> Iterator[str]:
    count = len(outcome.passed) + len(outcome.failed)
    yield f"{name}: {len(outcome.passed)} of {count} passed; skipped by their own conditions: {len(outcome.skipped)}"
    yield from (f"    failed: {each}" for each in sorted(outcome.failed))


@contextmanager
def _server(asked: argparse.Namespace) -> Iterator[dict[str, str]]:
    if asked.url:
        yield _environment(asked.url, os.environ["CLOCHE_API_KEY"])
        return
    key = "cl_" + secrets.token_hex(20)
    with serve(key, asked.port or free_port()) as url:
        yield _environment(url, key)


def _environment(url: str, key: str) -> dict[str, str]:
    own = {name: text for name, text in os.environ.items() if not name.startswith(("OPENSANDBOX_", "CLOCHE_"))}
    return {
        **own,
        "OPENSANDBOX_TEST_DOMAIN": url.removeprefix("http://") + "/opensandbox",
        "OPENSANDBOX_TEST_API_KEY": key,
        "OPENSANDBOX_TEST_USE_SERVER_PROXY": "true",
        "OPENSANDBOX_TEST_PVC_NAME": CLAIM,
        "OPENSANDBOX_TEST_HOST_VOLUME_DIR": HOST_DIRECTORY,
    }


if __name__ == "__main__":
    main()
