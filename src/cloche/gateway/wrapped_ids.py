"""Ids of containers that went through LiteLLM's proxy.

It gives its clients `cntr_` + base64 of "litellm:custom_llm_provider:..;model_id:..;container_id:ORIGINAL", to know by
itself where a container is; but when a client names one in a tool, it hands that on as it is. So it comes here.
"""

from __future__ import annotations

import base64
import binascii

PREFIX = "cntr_"
MAX_CHARACTERS = 4096
_MARK, _NAME = "litellm:", ";container_id:"


def unwrapped(id: str) -> str:
    """The id inside; the same where none is. Whose container it is, is asked later, as of any other id."""
    try:
        text = base64.b64decode(id[len(PREFIX) : MAX_CHARACTERS], validate=True).decode()
    except (binascii.Error, ValueError):
        return id
    before, _, original = text.rpartition(_NAME)
    return original if before.startswith(_MARK) and original.startswith(PREFIX) else id
