"""Which records of requests are found: by `/admin/requests`, and by the console."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import QueryParams

from cloche import errors
from cloche.api.admin_requests import decode_requests_query
from cloche.store.database import Database
from cloche.store.gateway import StepQuery, StepRecord, StoredSteps

NOW = 1_790_000_000.0


def request(id: str, at: float, outcome: str = "ok", owner: str = "ann", **fields: Any) -> StepRecord:
    return StepRecord(
        id=id,
        request=f"of-{id}",
        owner=owner,
        kind="request",
        started_at=NOW + at,
        seconds=0.5,
        outcome=outcome,
        fields=fields,
    )


def below(id: str, parent: str, at: float, owner: str = "ann") -> StepRecord:
    return StepRecord(
        id=id,
        request=f"of-{parent}",
        owner=owner,
        kind="model_call",
        started_at=NOW + at,
        seconds=0.1,
        outcome="ok",
        parent=parent,
    )


@pytest.fixture
async def steps(tmp_path: Path) -> AsyncIterator[StoredSteps]:
    database = Database(tmp_path / "store.sqlite3")
    await database.open()
    kept = StoredSteps(database)
    for each in (
        request("a", 1, model="m-1", response="resp_a", containers=["cntr_1", "cntr_2"]),
        request("b", 2, "left", model="m-2", completion="chatcmpl-b"),
        request("c", 3, "!odd", owner="bob", model="m-1", containers=["cntr_3"]),
        request("d", 4, "upstream_failed"),
        below("a1", "a", 1.1),
        below("e1", "e", 5),  # of requests that have not ended
        below("e2", "e", 6),
        below("f1", "f", 7, owner="bob"),
    ):
        kept.put(each)
    yield kept
    await database.aclose()


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, "dcba"),
        ({"limit": 2}, "dc"),
        ({"owner": "ann"}, "dba"),
        ({"outcome": "ok"}, "a"),
        ({"outcome": "!ok"}, "dcb"),
        ({"outcome": "!left"}, "dca"),
        ({"outcome": "%"}, ""),
        ({"model": "m-1"}, "ca"),
        ({"model": "m"}, ""),
        ({"model": "m-1", "owner": "ann"}, "a"),
        ({"since": NOW + 3}, "dc"),
        ({"until": NOW + 3}, "ba"),
        ({"since": NOW + 2, "until": NOW + 4}, "cb"),
        ({"id": "of-b"}, "b"),
        ({"id": "b"}, "b"),
        ({"id": "resp_a"}, "a"),
        ({"id": "chatcmpl-b"}, "b"),
        ({"id": "cntr_1"}, "a"),
        ({"id": "cntr_2"}, "a"),
        ({"id": "cntr_3", "owner": "ann"}, ""),
        ({"id": "cntr_%"}, ""),
        ({"id": "1 OR 1"}, ""),
        ({"before": "c"}, "ba"),
        ({"before": "c", "outcome": "ok"}, "a"),
        ({"before": "d", "owner": "ann"}, "ba"),
    ],
    ids=str,
)
async def test_requests_are_found_by_their_fields(steps: StoredSteps, wanted: dict[str, Any], found: str):
    assert "".join(each.id for each in await steps.requests(StepQuery(**wanted))) == found


async def test_a_page_does_not_reveal_foreign_records(steps: StoredSteps):
    said = []
    for before in ("c", "x"):
        with pytest.raises(errors.InvalidRequest) as refused:
            await steps.requests(StepQuery(before=before, owner="ann"))
        said.append(str(refused.value).replace(repr(before), ""))
    assert said[0] == said[1]


async def test_an_unfinished_request_is_found_by_its_steps(steps: StoredSteps):
    async def ids(since: float, owner: str | None = None) -> list[str]:
        return [each.id for each in await steps.list_unfinished(NOW + since, owner)]

    assert await ids(0) == ["e1", "e2", "f1"]
    assert await ids(0, "bob") == ["f1"]
    assert await ids(6) == ["e2", "f1"]
    steps.put(request("e", 5))
    assert await ids(0) == ["f1"]


async def test_records_of_one_id_are_those_of_the_asking_owner(steps: StoredSteps):
    steps.put(request("g", 9, owner="bob"))
    steps.put(StepRecord(**{**_fields(request("h", 8)), "request": "of-g"}))
    assert [each.id for each in await steps.of("of-g")] == ["h", "g"]
    assert [each.id for each in await steps.of("of-g", "bob")] == ["g"]
    assert [each.id for each in await steps.of("of-g", "eve")] == []
    assert (await steps.get("g")) == request("g", 9, owner="bob")
    assert (await steps.get("of-g")) is None


def _fields(step: StepRecord) -> dict[str, Any]:
    return {name: getattr(step, name) for name in step.__struct_fields__}


def test_filters_are_read_from_a_query():
    asked = QueryParams("limit=7&owner=ann&outcome=!ok&model=m&id=cntr_1&since=1.5&until=2&before=x")
    assert decode_requests_query(asked) == StepQuery(
        limit=7, owner="ann", outcome="!ok", model="m", id="cntr_1", since=1.5, until=2.0, before="x"
    )
    assert decode_requests_query(QueryParams("model=&id=&since=&outcome=")) == StepQuery()


@pytest.mark.parametrize("value", ["yesterday", "nan", "inf", "-1", "1e400", "253402300800", "0x1", "1 2"])
@pytest.mark.parametrize("name", ["since", "until"])
def test_a_time_that_is_none_is_refused(name: str, value: str):
    with pytest.raises(errors.InvalidRequest, match=name):
        decode_requests_query(QueryParams({name: value}))


def test_a_filter_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(errors.InvalidRequest, match="'models' is no filter: there are limit, before, owner"):
        decode_requests_query(QueryParams("models=x"))
