"""What must stand beside every number: where, on what and when it was measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cloche.bench import ipykernel_peer
from cloche.bench.memory import figures

GIT_SECONDS = 10


def facts() -> dict[str, str]:
    memory_gib = figures(Path("/proc/meminfo"))["MemTotal"] / 1024**3
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "CPU": f"{_cpu()}, {len(os.sched_getaffinity(0))} usable",
        "memory": f"{memory_gib:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": platform.python_version(),
        "commit": commit(),
        "peer": _peer(),
        "load before": " ".join(f"{each:.2f}" for each in os.getloadavg()),
        "user": "root" if os.geteuid() == 0 else "an ordinary user",
    }


def commit() -> str:
    """Of the checkout that we run from, if we do."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"unknown (cloche {version('cloche')})"
    return found.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _peer() -> str:
    if missing := ipykernel_peer.missing():
        return f"none: {', '.join(missing)} not installed; {ipykernel_peer.ADVICE}"
    return (
        ", ".join(f"{name} {_version(name)}" for name in ipykernel_peer.NEEDED)
        + f" on Python {sys.version_info[0]}.{sys.version_info[1]}"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"
