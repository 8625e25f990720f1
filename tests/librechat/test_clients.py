"""LibreChat's own client, @librechat/agents from npm, and LibreChat's own requests, against a server.

The tests themselves are in tests/js/librechat. `make test-clients` runs them with older releases as well.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests import javascript
from tests.conftest import RunningServer, serving
from tests.librechat.conftest import SIGNING_KEY
from tests.librechat.minting import private_pem

PLACE = javascript.JS / "librechat"
FILES = sorted(path.name for path in PLACE.glob("*.test.mjs"))
OLD = pytest.mark.skipif(not os.environ.get("OLD_CLIENTS"), reason="older releases are tried by `make test-clients`")


def try_out(server: RunningServer, *files: str, release: str = "", **variables: str) -> None:
    """Runs test files in one process: loading the client is what costs the most."""
    place = {
        "LIBRECHAT_CODE_BASEURL": f"{server.url}/librechat/v1",
        "CLIENT_MODULES": str(javascript.modules(PLACE / release)),
        "CLOCHE_KEY": server.key,
    }
    javascript.run(["node", "--test", "--test-isolation=none", *files], cwd=PLACE, **{**place, **variables})


@pytest.mark.parametrize(
    "file", [pytest.param(name, marks=() if name == "execution.test.mjs" else pytest.mark.long) for name in FILES]
)
def test_the_client_works_unmodified(file: str, librechat_server: RunningServer):
    try_out(librechat_server, file)


def test_every_user_has_a_token_and_their_own_files(librechat_server: RunningServer):
    try_out(librechat_server, "users/jwt.test.mjs", CODEAPI_JWT_PRIVATE_KEY=private_pem(SIGNING_KEY))


@OLD
def test_a_rate_limited_user_reads_the_retry_time(own_data_dir: Path):
    with serving(own_data_dir, env={"CLOCHE_LIBRECHAT_EXEC_PER_MINUTE": "1"}) as server:
        try_out(server, "users/limited.test.mjs")


@OLD
def test_the_release_of_today_s_librechat_works_unmodified(librechat_server: RunningServer):
    try_out(librechat_server, *FILES, release="3.6.15")


@OLD
def test_the_first_generation_works_unmodified(librechat_server: RunningServer):
    try_out(librechat_server, "old/first_generation.test.mjs", release="2.4.85")


@OLD
def test_the_release_that_sends_no_key_works_with_one_in_its_url(librechat_server: RunningServer):
    with_key = librechat_server.url.replace("//", f"//librechat:{librechat_server.key}@")
    url = {"LIBRECHAT_CODE_BASEURL": f"{with_key}/librechat/v1"}
    try_out(librechat_server, "old/first_generation.test.mjs", release="3.1.77", **url)
