"""Runs E2B's own test suites, from checkouts that you give, against a `cloche serve` of this checkout.

    make e2b-suite CI_REPO=path/to/code-interpreter E2B_REPO=path/to/E2B [SUITES="S1 S2 S3 S4"] [MATCH=expression]
    make e2b-network E2B_REPO=path/to/E2B    S3's and S4's tests of the network, in a little internet: e2b_world.py

S1 code-interpreter Python, S2 code-interpreter JavaScript (with the released clients), S3 python-sdk (with the client
of the same commit), S4 js-sdk's live files (with the released client). Nothing of theirs is changed: JavaScript tests
import from `../src`, where two lines stand that hand on the released package.

A test is *live* if it fails when nothing listens at the server's address; those that pass then test the client alone.
That is found out once, in a first run against a closed port, and kept in the work directory.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PYTEST = ["pytest", "pytest-asyncio", "pytest-xdist", "pytest-dotenv", "python-dotenv", "pytest-timeout"]
RELEASED = ["e2b-code-interpreter==2.11.5", "e2b==2.63.0"]
SAME_COMMIT = ["e2b-code-interpreter==2.9.1", "e2b==2.45.1"]
VITEST = ["vitest@^4.1", "dotenv@^16", "msw@^2", "@e2b/code-interpreter@2.8.0", "e2b@2.51.0"]
LIVE_JS = """\
import { defineConfig } from 'vitest/config'
export default defineConfig({
  test: {
    isolate: true, environment: 'node', testTimeout: 30000, env: process.env,
    include: [
      'tests/api/{info,kill,list,snapshot}.test.ts',
      'tests/sandbox/{create,connect,kill,timeout,metrics,secure,host,network,internetAccess,snapshot,snapshot-api}.test.ts',
      'tests/sandbox/{fork,lifecyclePayload}.test.ts',
      'tests/sandbox/{commands,files,pty,git}/*.test.ts',
      'tests/template/{build,exists,backgroundBuild,tags}.test.ts',
      'tests/template/methods/*.test.ts',
    ],
  },
})
"""
PER_TEST_SECONDS = 120


class Outcome(NamedTuple):
    passed: set[str]
    failed: set[str]
    skipped: set[str]


class Suite(NamedTuple):
    name: str
    directory: Path
    command: list[str]
    report: Path


def main() -> None:
    asked = _arguments()
    asked.work.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in asked.suites:
        suite = SUITES[name](asked)
        if asked.prepare:
            continue
        offline = _offline(suite, asked)
        with _server(asked) as environment:
            outcome = run_suite(suite, environment)
        lines += _told(suite.name, outcome, offline)
        (asked.work / f"{suite.name}.failed").write_text("".join(f"{each}\n" for each in sorted(outcome.failed)))
    print("\n".join(lines))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ci-repo", type=Path, help="a checkout of code-interpreter")
    parser.add_argument("--e2b-repo", type=Path, required=True, help="a checkout of E2B")
    parser.add_argument("--work", type=Path, default=HERE / ".suites", help="where environments are made")
    parser.add_argument("--suites", nargs="+", default=["S1", "S2", "S3", "S4"], choices=["S1", "S2", "S3", "S4"])
    parser.add_argument("--match", default="", help="only tests whose names match (pytest's -k, vitest's -t)")
    parser.add_argument("--files", nargs="+", default=[], help="only files of tests that have one of these words")
    parser.add_argument("--prepare", action="store_true", help="make environments, and run nothing")
    parser.add_argument("--port", type=int, help="where its server listens")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--url", help="a server that runs already, with CLOCHE_API_KEY set to its key")
    return parser.parse_args()


# -- the suites


def _code_interpreter_python(asked: argparse.Namespace) -> Suite:
    python = make_python_environment(asked.work / "released", [*RELEASED, *PYTEST])
    return _pytest("S1", python, asked.ci_repo / "python", asked, ["tests"])


def _python_sdk(asked: argparse.Namespace) -> Suite:
    python = make_python_environment(asked.work / "same-commit", [*SAME_COMMIT, *PYTEST])
    directory, paths = asked.e2b_repo / "packages/python-sdk", ["tests/sync", "tests/async", "tests/shared/git"]
    return _pytest("S3", python, directory, asked, _chosen(directory, paths, asked.files))


def _chosen(directory: Path, paths: list[str], words: list[str]) -> list[str]:
    """The files below those paths that have one of the words in their name; the paths where there are no words."""
    found = (file for path in paths for file in sorted((directory / path).rglob("test_*.py")))
    chosen = [str(file.relative_to(directory)) for file in found if any(word in file.name for word in words)]
    return chosen if words else paths


def _pytest(name: str, python: Path, directory: Path, asked: argparse.Namespace, paths: Sequence[str]) -> Suite:
    report = asked.work / f"{name}.xml"
    match = ["-k", asked.match] if asked.match else []
    # The script, not `python -m pytest`: that would put the checkout's own copy of the client first.
    pytest = [str(python.with_name("pytest")), "-q", "-n", str(asked.workers), f"--timeout={PER_TEST_SECONDS}"]
    return Suite(name, directory, [*pytest, f"--junitxml={report}", *match, *paths], report)


def _code_interpreter_js(asked: argparse.Namespace) -> Suite:
    directory = _js_environment(asked.work / "js-ci", asked.ci_repo / "js/tests", "@e2b/code-interpreter")
    shutil.copy(asked.ci_repo / "js/vitest.config.mts", directory)
    return _vitest("S2", directory, asked)


def _js_sdk(asked: argparse.Namespace) -> Suite:
    directory = _js_environment(asked.work / "js-sdk", asked.e2b_repo / "packages/js-sdk/tests", "e2b")
    (directory / "vitest.config.mts").write_text(LIVE_JS)
    return _vitest("S4", directory, asked)


def _vitest(name: str, directory: Path, asked: argparse.Namespace) -> Suite:
    report = asked.work / f"{name}.xml"
    match = ["-t", asked.match] if asked.match else []
    reporters = ["--reporter=default", "--reporter=junit", f"--outputFile.junit={report}"]
    command = ["npx", "vitest", "run", f"--maxWorkers={asked.workers}", *reporters, *match, *asked.files]
    return Suite(name, directory, command, report)


SUITES = {"S1": _code_interpreter_python, "S2": _code_interpreter_js, "S3": _python_sdk, "S4": _js_sdk}


def make_python_environment(directory: Path, packages: list[str]) -> Path:
    python = directory.resolve() / "bin/python"
    if not python.exists():
        uv = str(BIN / "uv")
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, directory], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *packages], check=True)
    return python


def _js_environment(directory: Path, tests: Path, package: str) -> Path:
    if not (directory / "node_modules").exists():
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "init", "-y"], cwd=directory, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["npm", "install", "--silent", *VITEST], cwd=directory, check=True)
    shutil.copytree(tests, directory / "tests", dirs_exist_ok=True)
    source = directory / "src"
    source.mkdir(exist_ok=True)
    (source / "index.ts").write_text(f"export * from '{package}'\nexport {{ default }} from '{package}'\n")
    (source / "errors.ts").write_text(f"export * from '{package}'\n")
    return directory


# -- running them


def _offline(suite: Suite, asked: argparse.Namespace) -> set[str]:
    """Tests that pass with nothing behind the address."""
    kept = asked.work / f"{suite.name}.offline.json"
    if not kept.exists():
        if asked.match or asked.files:
            return set()
        outcome = run_suite(suite, _environment(f"http://127.0.0.1:{free_port()}", "e2b_" + "0" * 40))
        kept.write_text(json.dumps(sorted(outcome.passed)))
    return set(json.loads(kept.read_text()))


def run_suite(suite: Suite, environment: dict[str, str]) -> Outcome:
    suite.report.unlink(missing_ok=True)
    subprocess.run(suite.command, cwd=suite.directory, env=environment)  # its exit status says only that some failed
    outcome = Outcome(set(), set(), set())
    for case in ElementTree.parse(suite.report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        bin = (
            outcome.failed
            if kinds & {"failure", "error"}
            else outcome.skipped
            if "skipped" in kinds
            else outcome.passed
        )
        bin.add(name)
    return outcome


def _told(name: str, outcome: Outcome, offline: set[str]) -> Iterator[str]:
    live_passed, live_failed = outcome.passed - offline, outcome.failed - offline
    counts = f"live {len(live_passed)} of {len(live_passed) + len(live_failed)} passed"
    rest = f"offline {len(outcome.passed & offline)} passed, skipped {len(outcome.skipped)}"
    yield f"{name}: {counts}; {rest}"
    yield from (f"    failed: {each}" for each in sorted(outcome.failed))


@contextmanager
def _server(asked: argparse.Namespace) -> Iterator[dict[str, str]]:
    if asked.url:
        yield _environment(asked.url, os.environ["CLOCHE_API_KEY"])
        return
    key = "e2b_" + secrets.token_hex(20)
    with serve(key, asked.port or free_port()) as url:
        yield _environment(url, key)


@contextmanager
def serve(key: str, port: int) -> Iterator[str]:
    """The address of a `cloche serve` with that key, which ends with the block."""
    command = [str(BIN / "cloche"), "serve", "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, "CLOCHE_API_KEY": key}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield next(line.split()[1] for line in process.stdout if line.startswith("ready "))
    finally:
        process.terminate()
        process.wait(60)


def _environment(url: str, key: str) -> dict[str, str]:
    kept = ("E2B_DOMAIN",)  # of a little internet
    own = {name: text for name, text in os.environ.items() if name in kept or not name.startswith(("E2B_", "CLOCHE_"))}
    names = ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL")
    return {
        **own,
        **dict.fromkeys(names, f"{url}/e2b"),
        "E2B_API_KEY": key,
        "E2B_TESTS_TEMPLATE": "code-interpreter-v1",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
