"""Fewer mappings of libraries, and every one of them still does what it did."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, decimal, hashlib, json, sqlite3, ssl, sys
from cloche.linux import memory_layout as mappings

def count():
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)

before = count()
gone = mappings.join_libraries()
assert count() <= before - gone + 2, (before, gone, count())
with open("/proc/self/maps") as file:
    assert not [line for line in file if "wx" in line.split()[1]]
assert sqlite3.connect(":memory:").execute("select 1 + 1").fetchone() == (2,)
assert hashlib.sha256(b"a").hexdigest().startswith("ca978112") and ssl.create_default_context()
assert decimal.Decimal("0.1") + decimal.Decimal("0.2") == decimal.Decimal("0.3")
print(gone)
"""


def test_libraries_are_joined_and_go_on_working():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10


def test_a_second_time_there_is_nothing_left_to_join():
    program = (
        "import ssl\nfrom cloche.linux import memory_layout\n"
        "memory_layout.join_libraries()\nprint(memory_layout.join_libraries())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 0
