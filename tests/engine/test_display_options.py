"""What an execution shows beside what a notebook would, and how long it may take: as whoever runs it asks."""

from __future__ import annotations

import pytest

from cloche import errors
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import DisplayOptions, Limits, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

SAVING = "from PIL import Image\nImage.new('RGB', (2, 2)).save('shown.png')"


async def formats(box: Sandbox, code: str, showing: DisplayOptions | None = None) -> list[list[str]]:
    run = await box.context().execute(code, showing=showing).result()
    assert run.outcome == "ok", run
    return [result.formats() for result in run.results]


async def test_nothing_more_than_a_notebook_shows_by_default(box: Sandbox):
    assert await formats(box, "[1]") == [["text"]]
    assert await formats(box, SAVING) == []
    run = await box.context().execute("list(range(2000))").result()
    assert run.text is not None and run.text.endswith("...]")


async def test_display_options_apply_to_their_run_only(box: Sandbox):
    assert await formats(box, "[1]", DisplayOptions(json=True)) == [["text", "json"]]
    assert [each[:2] for each in await formats(box, SAVING, DisplayOptions(saved_images=True))] == [["text", "png"]]
    whole = await box.context().execute("list(range(2000))", showing=DisplayOptions(whole_text=True)).result()
    assert whole.text is not None and whole.text.endswith("1999]")
    assert await formats(box, "[1]") == [["text"]]
    assert await formats(box, SAVING) == []


async def test_a_picture_that_is_shown_is_shown_in_every_run(box: Sandbox):
    assert len(await formats(box, "from PIL import Image\nImage.new('RGB', (2, 2)).show()")) == 1


async def test_until_the_deadline_there_is_no_other_limit_if_there_is_one(engine: Engine):
    for lifetime_seconds, outcome in ((60.0, "ok"), (None, "timed_out")):
        spec = SandboxSpec(limits=Limits(execution_seconds=0.1), lifetime_seconds=lifetime_seconds)
        box = await engine.create(spec)
        run = await box.context().execute("import time; time.sleep(0.5)", until_deadline=True).result()
        assert run.outcome == outcome
        await box.kill()


async def test_a_languages_default_context_is_the_same_each_time(box: Sandbox):
    assert box.default_context("python") is box.default_context() is box.context()
    with pytest.raises(errors.InvalidRequest, match="no language 'cobol'"):
        box.default_context("cobol")
