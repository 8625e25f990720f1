"""The model `cloche/echo`: the whole path without any upstream, with OpenAI's own client."""

from __future__ import annotations

from openai import OpenAI

from cloche.gateway.upstream.echo import find_fenced_code

CODE_TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}
MESSAGE = "Twice:\n```python\nx = 20\nprint('first')\n```\nand\n```python\nx + 1\n```\n"


def test_echo_runs_the_code_of_the_message_and_answers_with_its_output(client: OpenAI):
    answer = client.responses.create(
        model="cloche/echo", input=MESSAGE, tools=[CODE_TOOL], include=["code_interpreter_call.outputs"]
    )
    assert [item.type for item in answer.output] == ["code_interpreter_call", "code_interpreter_call", "message"]
    assert [item.outputs[0].logs for item in answer.output[:2]] == ["first\n", "21\n"]
    assert "first" in answer.output_text and "21" in answer.output_text


def test_a_stream_of_echo_ends_with_the_same_answer(client: OpenAI):
    with client.responses.stream(model="cloche/echo", input=MESSAGE, tools=[CODE_TOOL]) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_response()
    assert kinds.count("response.code_interpreter_call.interpreting") == 2
    assert "21" in answer.output_text


def test_without_the_tool_echo_describes_itself(client: OpenAI):
    answer = client.responses.create(model="cloche/echo", input="Hello")
    assert answer.output_text.startswith("Hello") and "cloche/echo" in answer.output_text


# -- what counts as code


def test_code_stands_between_fences_of_python_or_of_nothing():
    text = "a\n```python\n1\n```\n```py \n2\n2\n```  \n```\n3\n```\n``` python3\r\n4\r\n```\r\n```python\nnever closed"
    assert list(find_fenced_code(text)) == ["1\n", "2\n2\n", "3\n", "4\r\n"]


def test_fences_of_other_languages_are_skipped_with_their_contents():
    text = "```json\n{}\n```\nbetween\n```python\n1\n```\n```js\n```python\n2\n```\nend"
    assert list(find_fenced_code(text)) == ["1\n"]
    assert list(find_fenced_code("```inline``` is no fence\n```\n1\n```")) == ["1\n"]


def test_no_message_takes_echo_longer_than_its_length():
    """Half a million fences: an expression that looks for the end of each of them would take hours."""
    assert list(find_fenced_code("```python\n" * 500_000)) == []
    assert len(list(find_fenced_code("```\n" * 500_000))) == 250_000
