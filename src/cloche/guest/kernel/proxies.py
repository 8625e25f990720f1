"""Proxies of urllib, where a sandbox gets a network while its programs run."""

from __future__ import annotations

import sys
from typing import Any


def reset_urllib_opener(env: dict) -> None:
    """Makes `urlopen` read the proxies again: it remembers those of its first call.

    pandas and others use it. Only an opener that urllib made by itself is dropped; one that the program has
    installed stays.
    """
    urllib: Any = sys.modules.get("urllib.request")
    opener = getattr(urllib, "_opener", None)
    if (
        opener is not None
        and any(name.lower().endswith("_proxy") for name in env)
        and _is_default_opener(urllib, opener)
    ):
        urllib._opener = None


def _is_default_opener(urllib: Any, opener: Any) -> bool:
    usual = urllib.build_opener()
    kinds = {type(each) for each in usual.handlers} | {urllib.ProxyHandler}
    return opener.addheaders == usual.addheaders and all(type(each) in kinds for each in opener.handlers)
