"""Programs that leave something when they end: files that something still holds, streams that are others by then."""

from __future__ import annotations

WRITER = "class Writer:\n    def __init__(self):\n        self.file = open('o', 'w')\n        self.file.write('data')\n"
TEE = """
import sys
class Tee:
    def __init__(self, *files): self.files = files
    def write(self, text): [file.write(text) for file in self.files]
    FLUSH
sys.stdout = Tee(sys.stdout, open('o', 'w'))
print('data')
"""

FILES = {
    "global": "file = open('o', 'w'); file.write('data')",
    "global beside a function": "def f(): pass\nfile = open('o', 'w'); file.write('data')",
    "global beside a lambda": "file = open('o', 'w'); say = lambda text: file.write(text); say('data')",
    "global beside a class": "class A:\n    def f(self): pass\nfile = open('o', 'w'); file.write('data')",
    "bytes": "def f(): pass\nfile = open('o', 'wb'); file.write(b'data')",
    "an instance": WRITER + "writer = Writer()",
    "a list of instances": WRITER + "writers = [Writer()]",
    "a class": "class A:\n    file = open('o', 'w')\nA.file.write('data')",
    "a closure": "def make():\n    file = open('o', 'w')\n    return lambda text: file.write(text)\nmake()('data')\n"
    "say = make(); say('more')",
    "a default": "def say(file=open('o', 'w')): file.write('data')\nsay()",
    "a cache": "import functools\n@functools.lru_cache\ndef file(): return open('o', 'w')\nfile().write('data')",
    "a partial": "import functools\nsay = functools.partial(print, file=open('o', 'w')); say('data')",
    "a cycle": "def f():\n    file = open('o', 'w'); file.write('data'); a = [file]; a.append(a)\nf()",
    "csv": "import csv\ndef f(): pass\nwriter = csv.writer(open('o', 'w')); writer.writerow([1, 2])",
    "an exception": "def f():\n    file = open('o', 'w'); file.write('data'); raise ValueError\ntry: f()\n"
    "except ValueError as error: kept = error",
    "an exception that ends it": "def f():\n    file = open('o', 'w'); file.write('data'); 1 / 0\nf()",
    "exit inside a function": "import sys\ndef f():\n    file = open('o', 'w'); file.write('data'); sys.exit(3)\nf()",
    "a loop": "import asyncio\nasync def f():\n    global file\n    file = open('o', 'w'); file.write('data')\n"
    "asyncio.run(f())",
    "a generator": "def f():\n    with open('o', 'w') as file:\n        file.write('data'); yield\ng = f(); next(g)",
    "a thread": "import threading\nfile = open('o', 'w')\nthreading.Thread(target=lambda: file.write('data')).start()",
    "another module": "import json\njson.kept = open('o', 'w'); json.kept.write('data')",
    "builtins": "import builtins\nbuiltins.kept = open('o', 'w'); kept.write('data')",
    "logging": "import logging\nlogging.getLogger().addHandler(logging.StreamHandler(open('o', 'w')))\n"
    "logging.warning('data')\ndef f(): pass\nfile = open('l', 'w'); file.write('data')",
    "gzip": "import gzip\ndef f(): pass\nfile = gzip.open('o', 'wt'); file.write('data')",
    "gzip of another module": "import gzip, json\njson.kept = gzip.open('o', 'wt'); json.kept.write('data')",
    "zip": "import zipfile\ndef f(): pass\narchive = zipfile.ZipFile('o', 'w'); archive.writestr('a', 'b')",
    "shelve": "import shelve\ndef f(): pass\nshelf = shelve.open('o'); shelf['a'] = 1",
    "a finalizer": "class A:\n    def __del__(self): self.file.write('data')\na = A(); a.file = open('o', 'w')\n",
    "processes": "from multiprocessing import Pool\nfile = open('o', 'w'); file.write('data')\n"
    "with Pool(1) as pool: print(pool.map(abs, [-1]))",
}
STREAMS = {
    "stdout is a string": "import io, sys\nprint('data'); sys.stdout = io.StringIO(); print('lost')",
    "stdout is a file": "import sys\nprint('first'); sys.stdout = open('o', 'w'); print('data')",
    "stdout is None": "import sys\nprint('data'); sys.stdout = None; print('lost')",
    "stderr is a file": "import sys\nsys.stderr = open('o', 'w'); print('data', file=sys.stderr)",
    "redirected for good": "import contextlib, io\nprint('data')\n"
    "contextlib.redirect_stdout(io.StringIO()).__enter__(); print('lost')",
    "detached": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8'); print('data')",
    "wrapped again": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8'); print('data')",
    "encoded": "import codecs, sys\nsys.stdout = codecs.getwriter('utf-8')(sys.stdout.detach()); print('data')",
    "tee": TEE.replace("FLUSH", "def flush(self): [file.flush() for file in self.files]"),
    "tee that does not flush": TEE.replace("FLUSH", "def flush(self): pass"),
    "tee without flush": TEE.replace("FLUSH", ""),
    "tee that cannot flush": TEE.replace("FLUSH", "def flush(self): 1 / 0"),
    "finalizer that prints": "import io, sys\nclass A:\n    def __del__(self): print('bye')\na = A()\n"
    "sys.stdout = io.StringIO()",
}
OTHERS = {
    "never awaited": "async def f(): pass\nkept = f()",
    "never awaited, at once": "async def f(): pass\nf()",
    "never closed": "import warnings\nwarnings.simplefilter('always')\ndef f(): pass\nfile = open('o', 'w')",
    "loop of the main thread": "import asyncio\nasync def f(): return 1\n"
    "print(asyncio.get_event_loop().run_until_complete(f()))",
    "names": "import asyncio, threading\nprint(threading.Thread(target=print).name)\n"
    "async def f(): print(asyncio.current_task().get_name())\nasyncio.run(f())",
}
PROGRAMS = {**FILES, **STREAMS, **OTHERS}


def all_of_them(python: str, directory: str) -> str:
    """A command that runs those of a directory one after another, and says of each what is to be seen afterwards."""
    look = "echo $?; cat out err; for f in *; do echo $f $(stat -c %s $f); done; printf '\\0'"
    each = f"mkdir $n; cd $n; {python} {directory}/$n.py >out 2>err; {look}; cd .."
    return f"cd $(mktemp -d); for n in $(seq 0 {len(PROGRAMS) - 1}); do {each}; done"
