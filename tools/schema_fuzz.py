"""Schemathesis against a server of our own: what published OpenAPI files say, tried on the dialects that speak so.

    make fuzz E2B_REPO=checkout OPENSANDBOX_REPO=checkout

`/api/v1` is tried by its own document and must keep every word of it. Of vendors' documents we implement a part, and
answer what we do not have with a clear error: there, whatever is no server error and has the right shape will do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from soak.host import Host

import cloche

SHAPE = "not_a_server_error,content_type_conformance,response_schema_conformance"
STRICT = f"{SHAPE},status_code_conformance"
REQUEST_SECONDS = 20
FINE = ["2xx", "3xx", "4xx", "501"]  # 501 says of a part of a vendor's API that it is not here, and what is instead
# These answer for as long as somebody listens.
ENDLESS = r"/(hold|watch|follow|events|stream|execute|attach|processes.*|logs)$|openapi.json"


class Trial(NamedTuple):
    name: str
    document: str  # a url, or a path
    url: str
    header: str
    checks: str
    skipped: str = ENDLESS  # paths


def trials(host: Host, e2b: Path | None, opensandbox: Path | None) -> list[Trial]:
    found = [Trial("native", f"{host.url}/api/v1/openapi.json", host.url, "X-API-Key", STRICT)]
    if e2b is not None:
        found.append(Trial("E2B", str(e2b / "spec/openapi.yml"), f"{host.url}/e2b", "X-API-Key", SHAPE))
    if opensandbox is not None:
        document = str(opensandbox / "specs/sandbox-lifecycle.yml")
        found.append(Trial("OpenSandbox", document, f"{host.url}/opensandbox/v1", "OPEN-SANDBOX-API-KEY", SHAPE))
    return found


def run(trial: Trial, program: Path, place: Path, key: str, sandbox: str, examples: int, seed: int) -> int:
    """Its exit status: 0 where nothing was found."""
    settings = place / f"{trial.name}.toml"
    names = ("id", "sandboxID", "sandboxId", "sandbox_id")
    lines = ["[parameters]", *(f'"path.{name}" = "{sandbox}"' for name in names)]
    if trial.checks == SHAPE:
        lines += ["[checks.not_a_server_error]", f"expected-statuses = {json.dumps(FINE)}"]
    settings.write_text("\n".join(lines) + "\n")
    command = [str(program), "--config-file", str(settings), "run", trial.document, "--url", trial.url]
    command += ["--header", f"{trial.header}: {key}", "--checks", trial.checks, "--max-examples", str(examples)]
    command += ["--seed", str(seed), "--request-timeout", str(REQUEST_SECONDS), "--phases", "examples,coverage,fuzzing"]
    command += ["--exclude-path-regex", trial.skipped, "--exclude-method", "DELETE", "--continue-on-failure"]
    command += ["--suppress-health-check", "all", "--warnings", "off", "--no-color"]
    print(f"# {trial.name}", flush=True)
    return subprocess.run(command, cwd=place, check=False).returncode


def main() -> int:
    given = _arguments()
    with tempfile.TemporaryDirectory(prefix="cloche-fuzz-") as directory:
        place = Path(directory)
        host = Host(place, given.data_dir, 1)
        host.start()
        try:
            statuses = [
                _tried(trial, host, place, given) for trial in trials(host, given.e2b_repo, given.opensandbox_repo)
            ]
        finally:
            stopped = host.stop()
            errors = _server_errors(host.log)
        print("\n".join(errors) or "the server's log has no error of its own")
    return 1 if any(statuses) or stopped or errors else 0


def _tried(trial: Trial, host: Host, place: Path, given: argparse.Namespace) -> int:
    key = host.owners[0].key
    with cloche.Sandbox(url=host.url, api_key=key, timeout=3600) as box:
        return run(trial, given.schemathesis, place, key, box.id, given.examples, given.seed)


def _server_errors(log: Path) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if "[error" in line or "Traceback" in line]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", type=Path, default=Path(".venv-fuzz/bin/schemathesis"))
    parser.add_argument("--data-dir", default=os.environ.get("CLOCHE_DATA_DIR") or ".data", help="with the template")
    parser.add_argument("--e2b-repo", type=Path)
    parser.add_argument("--opensandbox-repo", type=Path)
    parser.add_argument("--examples", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.schemathesis = given.schemathesis.absolute()
    return given


if __name__ == "__main__":
    sys.exit(main())
