"""What is run. The same source for Cloche and for its peer."""

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
SPIN = "print('go', flush=True)\nwhile True: pass"
IMPORTS = "import pandas, matplotlib.pyplot"
