"""How many threads the BLAS behind NumPy uses. It is one setting for the whole process.

As many threads as cores are the fastest on an idle machine. Beside another busy process they can be
ten times slower than one thread, since each product waits for its slowest thread; so the number is
found by a short trial unless somebody has chosen it.
"""

from __future__ import annotations

import os
import time

import numpy as np

_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")
_TRIAL_SECONDS = 0.04  # for each number of threads; longer than a time slice of the system
_TRIAL_SHAPE = (64, 512, 1536)  # rows, in_features, out_features: a layer's product in a batch


def threads_of_environment() -> int | None:
    """What the first variable says that is a number above 0; None if none is."""
    values = (os.environ.get(name, "") for name in _VARIABLES)
    return next((int(v) for v in values if v.isdecimal() and int(v) > 0), None)


def use_threads(asked: int | None, cores: int) -> int:
    """Set the threads of matrix products, and give what is in force.

    Args:
        asked: that many; None for the number that is fastest now, of all cores, half of them and
            one, unless a variable of the environment (OPENBLAS_NUM_THREADS, ...) says something.
        cores: what this process may use; BLAS itself sees the machine, not the container.
    """
    from threadpoolctl import ThreadpoolController  # costs an import

    blas = ThreadpoolController().select(user_api="blas")
    if asked is not None:
        blas.limit(limits=asked)
    elif threads_of_environment() is None:
        rates = {}
        for count in dict.fromkeys((cores, (cores + 1) // 2, 1)):
            blas.limit(limits=count)
            rates[count] = _products_per_second()
        blas.limit(limits=max(rates, key=lambda count: rates[count]))
    return max((library["num_threads"] for library in blas.info()), default=1)


def _products_per_second() -> float:
    rows, in_features, out_features = _TRIAL_SHAPE
    x = np.zeros((rows, in_features), np.float32)
    weight = np.zeros((out_features, in_features), np.float32)
    out = np.empty((rows, out_features), np.float32)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < _TRIAL_SECONDS or count < 2:
        np.matmul(x, weight.T, out=out)
        count += 1
    return count / elapsed
