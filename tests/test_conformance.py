"""Every backend that this host has passes every claim that is made for it."""

from __future__ import annotations

import pytest
import pytest_asyncio

from cloche import errors
from cloche.config import Config, Pool
from cloche.engine.examine import boxes_of, claims_for
from cloche.isolation import conformance
from cloche.isolation.conformance import CLAIMS, Outcome
from cloche.model import Template
from cloche.sdk.assembly import assemble


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["namespaces", "plain-unsafe"])
async def outcomes(request, data_dir: str, template: Template) -> tuple[str, dict[str, Outcome]]:
    """One pass over all claims: each test then looks at its own."""
    backend = request.param
    try:
        engine = assemble(Config(data_dir=data_dir, backend=backend, pool=Pool(ready=1)))
    except errors.IsolationUnavailable as error:
        pytest.skip(str(error))
    async with engine:
        found = [outcome async for outcome in conformance.run(boxes_of(engine), claims_for(backend))]
    return backend, {outcome.name: outcome for outcome in found}


@pytest.mark.asyncio(loop_scope="module")
async def test_every_claim_holds(outcomes):
    backend, found = outcomes
    assert [claim.name for claim in claims_for(backend)] == list(found)
    assert {name: outcome.detail for name, outcome in found.items() if not outcome.passed} == {}


def test_there_are_forty_claims_or_more_and_each_has_a_name_of_its_own():
    assert len(CLAIMS) >= 40
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)


def test_a_backend_without_walls_is_asked_for_functions_only():
    assert {claim.kind for claim in claims_for("plain-unsafe")} == {"function"}
    assert {claim.kind for claim in claims_for("namespaces")} == {"function", "wall"}
