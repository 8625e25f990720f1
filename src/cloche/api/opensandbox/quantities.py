"""Amounts as Kubernetes writes them: "500m", "2", "512Mi", "2G". Pure; raises InvalidRequest."""

from __future__ import annotations

import re

from cloche import errors
from cloche.model import GIB, KIB, MIB

_CPU = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)(m?)", re.ASCII)
_BYTES = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([KMGT]i?|k)?", re.ASCII)
_UNITS = {
    None: 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": KIB,
    "Mi": MIB,
    "Gi": GIB,
    "Ti": 1024 * GIB,
}


def cpus(given: str) -> float:
    """ "500m" is half a CPU."""
    match = _CPU.fullmatch(given.strip())
    if match is None:
        raise errors.InvalidRequest(f"resourceLimits.cpu: it must be like 2, 0.5 or 500m, not {given[:80]!r}")
    return float(match[1]) / (1000 if match[2] else 1)


def size_bytes(given: str) -> int:
    """ "2Gi" is 2 * 1024**3, "2G" is 2 * 1000**3."""
    match = _BYTES.fullmatch(given.strip())
    if match is None:
        raise errors.InvalidRequest(f"resourceLimits.memory: it must be like 512Mi or 2G, not {given[:80]!r}")
    return int(float(match[1]) * _UNITS[match[2]])
