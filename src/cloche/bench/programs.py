"""The measured programs: the same source for Cloche and for its peers."""

from __future__ import annotations

ONE = "1+1"
FRAME = "import pandas as pd\npd.DataFrame({'city': ['Oslo', 'Lima', 'Pune'], 'x': [1, 2, 3], 'y': [0.5, 1.5, 2.5]})"
PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 4, 2, 3])\nplt.title('four points')\nplt.show()"
KILOBYTE = "print('x' * 1023)"
IMAGE_BYTES = 1_000_000
# Random bytes behind a PNG's signature: nothing on the way can make them smaller.
PREPARE_IMAGE = (
    f"import os\nfrom IPython.display import display\nimage = b'\\x89PNG\\r\\n\\x1a\\n' + os.urandom({IMAGE_BYTES - 8})"
)
IMAGE = "display({'image/png': image}, raw=True)"
LARGE_FRAME_BYTES = 100_000_000
LARGE_FRAME = (
    "import numpy as np, pandas as pd\n"
    f"frame = pd.DataFrame(np.random.rand({LARGE_FRAME_BYTES // 800}, 100))\nint(frame.values.nbytes)"
)
RAW_FORK = """
import os, time
ends = os.pipe()
began = time.perf_counter()
pid = os.fork()
if pid == 0:
    os.write(ends[1], b"1")
    os._exit(0)
os.read(ends[0], 1)
print(time.perf_counter() - began)
os.waitpid(pid, 0)
for end in ends:
    os.close(end)
"""
SPIN = "print('go', flush=True)\nwhile True: pass"
IMPORTS = "import pandas, matplotlib.pyplot"
STREAM_BYTES = 10_000_000
STREAM = f"for _ in range({STREAM_BYTES // 10_000}): print('x' * 9_999)"
