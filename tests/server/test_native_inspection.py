"""Variables, history and notebooks over `/api/v1`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest


@pytest.fixture(scope="module")
def api(server) -> Iterator[httpx2.Client]:
    headers = {"x-api-key": server.key}
    with httpx2.Client(base_url=f"{server.url}/api/v1", headers=headers, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def box(api: httpx2.Client) -> Iterator[str]:
    path = f"/sandboxes/{api.post('/sandboxes', json={}).json()['id']}"
    api.post(f"{path}/run", json={"code": "x = [1]; print('hi')\nx"})
    yield path
    api.delete(path)


def test_variables(api: httpx2.Client, box: str):
    found = api.get(f"{box}/contexts/default/variables").json()
    assert found["more"] == 0
    (x,) = found["variables"]
    assert (x["name"], x["type"], x["kind"], x["length"], x["preview"]) == ("x", "list", "variable", 1, "[1]")


def test_questions_about_code(api: httpx2.Client, box: str):
    context = f"{box}/contexts/default"
    done = api.post(f"{context}/complete", json={"code": "pri", "cursor": 3}).json()
    assert (done["start"], done["end"], done["matches"], len(done["types"])) == (0, 3, ["print"], 1)
    assert api.post(f"{context}/check", json={"code": "if x:"}).json() == {"status": "incomplete", "indent": 4}
    told = api.post(f"{context}/describe", json={"code": "x"}).json()
    assert told["found"] and "list" in told["text"]
    assert api.post(f"{context}/complete", json={"cursor": 3}).status_code == 400
    assert len(api.get(f"{box}/history").json()["cells"]) == 1


def test_history(api: httpx2.Client, box: str):
    found = api.get(f"{box}/history").json()
    assert found["dropped"] == 0
    (cell,) = found["cells"]
    assert (cell["context"], cell["language"], cell["count"], cell["outcome"]) == ("default", "python", 1, "ok")
    assert [each["output_type"] for each in cell["outputs"]] == ["stream", "execute_result"]
    assert api.get(f"{box}/history", params={"context": "default"}).json() == found


def test_notebook(api: httpx2.Client, box: str):
    answer = api.get(f"{box}/notebook")
    assert answer.headers["content-type"] == "application/x-ipynb+json"
    made = answer.json()
    assert (made["nbformat"], made["nbformat_minor"], len(made["cells"])) == (4, 5, 1)


@pytest.mark.parametrize("path", ["/contexts/nobody/variables", "/history?context=nobody", "/notebook?context=nobody"])
def test_a_context_that_is_not_there(api: httpx2.Client, box: str, path: str):
    answer = api.get(box + path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "context_not_found")


def test_a_field_that_does_not_exist_is_refused(api: httpx2.Client, box: str):
    answer = api.get(f"{box}/history?kontext=default")
    assert answer.status_code == 400
    assert "did you mean 'context'?" in answer.json()["error"]["message"]


def test_other_owners_do_not_see_them(server, box: str):
    asked = {"owner": "stranger", "role": "user", "name": "test"}
    made = httpx2.post(f"{server.url}/admin/keys", headers={"x-api-key": server.key}, json=asked).json()
    for path in ("/contexts/default/variables", "/history", "/notebook"):
        answer = httpx2.get(f"{server.url}/api/v1{box}{path}", headers={"x-api-key": made["key"]})
        assert answer.status_code == 404


def test_the_document_has_them(api: httpx2.Client):
    paths = api.get("/openapi.json").json()["paths"]
    assert "application/x-ipynb+json" in paths["/api/v1/sandboxes/{id}/notebook"]["get"]["responses"]["200"]["content"]
    assert "/api/v1/sandboxes/{id}/contexts/{context}/variables" in paths
