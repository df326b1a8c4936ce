"""Before anything imports NumPy: one BLAS thread, in the tests and in the programs they start.

Several threads beside another busy process wait for each other and take many times as long.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
