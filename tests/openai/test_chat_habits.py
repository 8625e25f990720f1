"""What is learned of a model from its refusals, and what is not: it holds for every client of the server."""

from __future__ import annotations

import pytest

from cloche import errors
from cloche.gateway.upstream.chat import ChatRequestStyle, ChatRequestStyles, refuses_field
from cloche.gateway.upstream.http import RecentModels

OTHER = ChatRequestStyles("http://127.0.0.1:8000/v1")


def refusal(message: str, param: str | None = None, reason: str | None = None, status: int = 400):
    return errors.UpstreamFailed(message, status=status, kind="invalid_request_error", reason=reason, param=param)


@pytest.mark.parametrize(
    "error",
    [
        refusal(
            "Unsupported parameter: 'max_tokens' is not supported here. Use 'max_completion_tokens' instead.",
            "max_tokens",
            "unsupported_parameter",
        ),
        refusal("Unrecognized request argument supplied: max_tokens"),
        refusal("property 'max_tokens' is unsupported"),
        refusal('{"detail": [{"type": "extra_forbidden", "loc": ["body", "max_tokens"]}]}', status=422),
        refusal("Extra inputs are not permitted", "body.max_tokens"),
        refusal("Additional properties are not allowed ('max_tokens' was unexpected)"),
        refusal("no", "max_tokens", "unknown_parameter"),
    ],
)
def test_a_field_that_is_refused_as_such_is_called_otherwise(error):
    assert refuses_field(error, "max_tokens")
    assert OTHER.find_alternative(OTHER.of("m"), error) == ChatRequestStyle(limit_name="max_completion_tokens")


@pytest.mark.parametrize(
    "error",
    [
        refusal("Invalid max_tokens value, the valid range of max_tokens is [1, 8192]", "max_tokens"),
        refusal("max_tokens is too large: 99. This model supports at most 10 completion tokens", "max_tokens"),
        refusal("max_tokens must be a positive integer"),
        refusal("Unsupported value: 'xhigh'. max_tokens", "reasoning_effort"),
        refusal("Unknown field: my_max_tokens"),
        refusal("Unknown parameter: max_tokens", status=500),
        refusal("The model does not exist", None, "model_not_found"),
    ],
)
def test_a_value_that_is_refused_changes_nothing(error):
    assert OTHER.find_alternative(OTHER.of("m"), error) is None


def test_no_way_comes_twice():
    habits = ChatRequestStyles("https://api.openai.com/v1")
    habit = habits.of("m")
    assert habit.limit_name == "max_completion_tokens"
    for words in ("max_completion_tokens", "stream_options"):
        other = habits.find_alternative(habit, refusal(f"Unknown parameter: {words}"))
        assert other is not None
        habit = other
    assert habit == ChatRequestStyle(limit_name="max_tokens", usage_in_stream=False)
    for words in ("max_completion_tokens", "max_tokens", "stream_options"):
        assert habits.find_alternative(habit, refusal(f"Unknown parameter: {words}")) is None


def test_only_answered_habits_are_remembered():
    habits = ChatRequestStyles("http://a/v1")
    other = habits.find_alternative(habits.of("m"), refusal("Unknown parameter: stream_options"))
    assert other is not None and habits.of("m").usage_in_stream
    habits.answered("m", other)
    assert not habits.of("m").usage_in_stream and habits.of("n").usage_in_stream


def test_the_models_that_were_asked_for_last_are_remembered():
    recent: RecentModels[int] = RecentModels(most=2)
    recent.keep("a", 1)
    recent.keep("b", 2)
    assert recent.of("a") == 1
    recent.keep("c", 3)
    assert (recent.of("a"), recent.of("b"), recent.of("c")) == (1, None, 3)
