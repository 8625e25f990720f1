"""Transcripts as messages of Chat Completions."""

from __future__ import annotations

import json

from cloche.gateway.upstream.chat import NO_OUTPUT, build_chat_messages

PICTURE = "data:image/png;base64,AAAA"


def user(text="?"):
    return {"type": "message", "role": "user", "content": text}


def said(text):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call(id, name="f", arguments="{}"):
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}


def output(id, what="done"):
    return {"type": "function_call_output", "call_id": id, "output": what}


def thought(text):
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def roles(given):
    return [message["role"] for message in given]


def call_ids(message):
    return [each["id"] for each in message["tool_calls"]]


def test_instructions_come_first_and_developers_are_the_system():
    given = build_chat_messages([{"role": "developer", "content": "Be brief."}, user()], "You are a cat.")
    assert given == [{"role": "system", "content": "You are a cat.\n\nBe brief."}, {"role": "user", "content": "?"}]


def test_parts_of_text_are_one_string():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert build_chat_messages([user(parts)]) == [{"role": "user", "content": "a\nb"}]


def test_assistant_text_and_calls_are_one_message():
    given = build_chat_messages(
        [user(), said("One moment."), call("a"), call("b"), output("a"), output("b"), said("Done.")]
    )
    assert roles(given) == ["user", "assistant", "tool", "tool", "assistant"]
    assert given[1]["content"] == "One moment."
    assert call_ids(given[1]) == ["a", "b"]


def test_outputs_follow_their_calls_wherever_they_were():
    given = build_chat_messages(
        [user(), call("a"), said("And then"), call("b"), output("b", "B"), user("!"), output("a", "A")]
    )
    assert roles(given) == ["user", "assistant", "tool", "tool", "user"]
    assert [message["content"] for message in given[2:4]] == ["A", "B"]


def test_a_call_without_output_gets_one_and_an_output_without_call_is_told():
    given = build_chat_messages([user(), call("a"), user("Well?"), output("z", "lost")])
    assert roles(given) == ["user", "assistant", "tool", "user", "user"]
    assert given[2]["content"] == NO_OUTPUT
    assert "lost" in given[4]["content"]


def test_ids_that_repeat_or_are_missing_are_mended():
    given = build_chat_messages(
        [user(), call("0"), output("0", "first"), call("0"), output("0", "second"), call(""), output("", "third")]
    )
    ids = [id for message in given if "tool_calls" in message for id in call_ids(message)]
    assert len(set(ids)) == 3
    assert [(each["tool_call_id"], each["content"]) for each in given if each["role"] == "tool"] == list(
        zip(ids, ["first", "second", "third"], strict=True)
    )


def test_arguments_are_always_an_object():
    calls = [call("a", "python", "print(1)"), call("b", "f", ""), call("c", "f", "[1]"), call("d", "f", '{"x": 1}')]
    sent = [
        json.loads(each["function"]["arguments"]) for each in build_chat_messages([user(), *calls])[1]["tool_calls"]
    ]
    assert sent == [{"code": "print(1)"}, {}, {"arguments": "[1]"}, {"x": 1}]


def test_pictures_of_tools_follow_in_one_message_of_the_user():
    shown = [{"type": "input_text", "text": "plot"}, {"type": "input_image", "image_url": PICTURE, "detail": "auto"}]
    items = [user(), call("a"), call("b"), output("a", shown), output("b", shown)]
    given = build_chat_messages(items)
    assert roles(given) == ["user", "assistant", "tool", "tool", "user"]
    assert [part["type"] for part in given[4]["content"]] == ["text", "image_url", "image_url"]
    blind = build_chat_messages(items, vision=False)
    assert roles(blind) == ["user", "assistant", "tool", "tool"]
    assert blind[2]["content"] == "plot\n[image]"


def test_pictures_and_files_of_the_user():
    parts = [
        {"type": "input_text", "text": "See"},
        {"type": "input_image", "image_url": PICTURE, "detail": "low"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"},
        {"type": "input_file", "filename": "a.csv", "file_data": "data:text/csv;base64,AAAA"},
        {"type": "input_image", "file_id": "file-1"},
    ]
    sees = build_chat_messages([user(parts)])[0]["content"]
    assert [part["type"] for part in sees] == ["text", "image_url", "file", "text", "text"]
    assert sees[1]["image_url"] == {"url": PICTURE, "detail": "low"}
    assert (
        build_chat_messages([user(parts)], vision=False)[0]["content"]
        == "See\n[image]\n[file a.pdf]\n[file a.csv]\n[image file-1]"
    )


def test_reasoning_goes_back_only_with_calls_of_the_turn_that_is_not_over():
    items = [user(), thought("old"), call("a"), output("a"), said("Hm."), user("!"), thought("new"), call("b")]
    given = build_chat_messages(items)
    thoughts = [message.get("reasoning_content") for message in given if message["role"] == "assistant"]
    assert thoughts == [None, None, "new"]
    assert "reasoning_content" not in build_chat_messages([user(), thought("a"), said("b")])[1]


def test_custom_tools_are_functions_with_one_argument():
    items = [
        user(),
        {"type": "custom_tool_call", "call_id": "a", "name": "shout", "input": "hey"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "HEY"},
    ]
    given = build_chat_messages(items)
    assert json.loads(given[1]["tool_calls"][0]["function"]["arguments"]) == {"input": "hey"}
    assert given[2]["content"] == "HEY"


def test_items_without_a_chat_equivalent_are_left_out():
    given = build_chat_messages(
        [user(), {"type": "web_search_call", "id": "ws_1"}, {"type": "reasoning", "summary": []}]
    )
    assert roles(given) == ["user"]


def test_a_refusal_is_said_again():
    refused = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert build_chat_messages([user(), refused])[1] == {"role": "assistant", "content": "No."}


def test_messages_of_the_system_are_joined_once():
    system = {"type": "message", "role": "developer", "content": "a" * 50}
    found = build_chat_messages([system] * 50_000, "first")
    assert roles(found) == ["system"]
    assert found[0]["content"].count("\n\n") == 50_000 and found[0]["content"].startswith("first\n\naa")
    assert roles(build_chat_messages([system, user(), system, {**system, "content": ""}])) == [
        "system",
        "user",
        "system",
    ]
