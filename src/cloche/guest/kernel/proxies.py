"""urllib's proxies, where a sandbox gets a network while its programs run."""

from __future__ import annotations

import sys
from typing import Any


def look_again(env: dict) -> None:
    """`urlopen` remembers the proxies of its first call, and pandas and others use it: it must ask again.

    Only what it has made by itself is forgotten; an opener that the program has installed stays.
    """
    urllib: Any = sys.modules.get("urllib.request")
    opener = getattr(urllib, "_opener", None)
    if opener is not None and any(name.lower().endswith("_proxy") for name in env) and _is_usual(urllib, opener):
        urllib._opener = None


def _is_usual(urllib: Any, opener: Any) -> bool:
    usual = urllib.build_opener()
    kinds = {type(each) for each in usual.handlers} | {urllib.ProxyHandler}
    return opener.addheaders == usual.addheaders and all(type(each) in kinds for each in opener.handlers)
