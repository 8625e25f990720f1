"""Ids of containers as LiteLLM's proxy changes them."""

from __future__ import annotations

import base64

import pytest

from cloche.gateway.containers import unwrap_container_id

ORIGINAL = "cntr_iwqiyyit7fmrihacn8h5m"


def wrapped(text: str) -> str:
    return "cntr_" + base64.b64encode(text.encode()).decode()


def test_the_id_inside_is_found():
    id = wrapped(f"litellm:custom_llm_provider:openai;model_id:e876f3;container_id:{ORIGINAL}")
    assert unwrap_container_id(id) == ORIGINAL


@pytest.mark.parametrize(
    "id",
    [
        ORIGINAL,
        "cntr_",
        "cntr_ü",
        "cntr_" + "A" * 100_000,
        wrapped("litellm:custom_llm_provider:openai;model_id:e876f3"),
        wrapped(f"other:custom_llm_provider:openai;container_id:{ORIGINAL}"),
        wrapped("litellm:custom_llm_provider:openai;container_id:../etc"),
    ],
)
def test_any_other_id_is_itself(id: str):
    assert unwrap_container_id(id) == id
