"""Whether an upstream refuses a field as such. Another way to ask helps then, and not if a value is what is wrong."""

from __future__ import annotations

import re

from cloche import errors

_AS_SUCH = re.compile(
    r"unsupported|not support|n't support|unrecogni[sz]ed|unknown|unexpected|extra[ _](?:forbidden|inputs|fields)"
    r"|not permitted|additional propert|no such (?:parameter|field|argument)",
    re.IGNORECASE,
)


def refuses(error: errors.UpstreamFailed, field: str) -> bool:
    """Whether the error says that there is no such field. If it names what it is about, that must be this field."""
    if error.status not in (400, 422) or not _AS_SUCH.search(f"{error.reason} {error.kind} {error}"):
        return False
    return field in re.split(r"\W+", error.param or str(error))
