"""Every backend that this host has passes every claim that is made for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cloche.config import Config, PoolConfig
from cloche.engine.operations.conformance import claims_for_backend, make_box_opener
from cloche.isolation import conformance
from cloche.isolation.conformance import ALL_CLAIMS
from cloche.sdk.assembly import assemble_engine


def test_every_claim_holds(bare_dir: str):
    """By the command with which everybody can try it at home."""
    command = [str(Path(sys.executable).with_name("cloche")), "--data-dir", bare_dir, "doctor", "--deep", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    found = json.loads(done.stdout)
    if not found["can_run"]:
        pytest.skip(f"this host cannot run sandboxes: it has no {found['missing']}")
    assert [claim["name"] for claim in found["claims"]] == [claim.name for claim in claims_for_backend("namespaces")]
    assert {claim["name"]: claim["advice"] for claim in found["claims"] if claim["state"] == "missing"} == {}
    assert done.returncode == 0


async def test_every_claim_for_a_backend_without_walls_holds(bare_dir: str):
    async with assemble_engine(Config(data_dir=bare_dir, backend="plain-unsafe", pool=PoolConfig(ready=1))) as engine:
        claims = claims_for_backend("plain-unsafe")
        found = [outcome async for outcome in conformance.run_claims(make_box_opener(engine), claims)]
    assert [outcome.name for outcome in found] == [claim.name for claim in claims]
    assert {outcome.name: outcome.detail for outcome in found if not outcome.passed} == {}


def test_there_are_forty_claims_or_more_and_each_has_a_name_of_its_own():
    assert len(ALL_CLAIMS) >= 40
    assert len({claim.name for claim in ALL_CLAIMS}) == len(ALL_CLAIMS)


def test_a_backend_without_walls_is_asked_for_functions_only():
    assert {claim.kind for claim in claims_for_backend("plain-unsafe")} == {"function"}
    assert {claim.kind for claim in claims_for_backend("namespaces")} == {"function", "wall"}
