"""Pictures as results: PIL's, as E2B's documentation has them."""

from __future__ import annotations

import base64

START = "from PIL import Image\nimage = Image.new('RGB', (4, 3), 'red')\n"


def test_a_picture_that_is_shown_is_a_result(box):
    run = box.run_code(START + "image.show()\nprint('shown')")
    assert [result.is_main_result for result in run.results] == [False]
    assert base64.b64decode(run.results[0].png).startswith(b"\x89PNG")
    assert (run.logs.stdout, run.logs.stderr) == (["shown\n"], [])


def test_a_picture_as_last_expression_is_the_result(box):
    run = box.run_code(START + "image")
    assert run.results[0].is_main_result and run.results[0].png


def test_a_picture_that_is_saved_under_a_name_is_a_result_and_a_file(box):
    run = box.run_code(START + "image.save('red.png')")
    assert [bool(result.png) for result in run.results] == [True]
    assert box.run_code("Image.open('/home/user/red.png').size").text == "(4, 3)"


def test_a_picture_that_is_saved_into_memory_or_not_at_all_is_none(box):
    run = box.run_code(START + "import io\nimage.save(io.BytesIO(), 'png')")
    assert run.results == [] and run.error is None
    run = box.run_code("image.save('x.nothing')")
    assert run.results == [] and run.error.name == "ValueError"
