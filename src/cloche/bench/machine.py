"""Facts about the machine, printed with every result: place, hardware, time and versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cloche.bench import ipykernel_peer
from cloche.bench.memory import read_figures

GIT_SECONDS = 10


def machine_facts() -> dict[str, str]:
    memory_gib = read_figures(Path("/proc/meminfo"))["MemTotal"] / 1024**3
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "CPU": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} usable",
        "memory": f"{memory_gib:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": platform.python_version(),
        "commit": current_commit(),
        "peer": _peer_versions(),
        "load before": " ".join(f"{each:.2f}" for each in os.getloadavg()),
        "user": "root" if os.geteuid() == 0 else "an ordinary user",
    }


def current_commit() -> str:
    """The commit of the checkout that we run from, if there is one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"unknown (cloche {version('cloche')})"
    return found.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _peer_versions() -> str:
    if missing := ipykernel_peer.missing_packages():
        return f"none: {', '.join(missing)} not installed; {ipykernel_peer.BENCH_ADVICE}"
    return (
        ", ".join(f"{name} {_package_version(name)}" for name in ipykernel_peer.PEER_PACKAGES)
        + f" on Python {sys.version_info[0]}.{sys.version_info[1]}"
    )


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"
