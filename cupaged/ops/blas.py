"""How many threads the BLAS behind NumPy uses. It is one setting for the whole process."""

from __future__ import annotations

import os

_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")


def use_threads(asked: int | None, cores: int) -> int:
    """Set the threads of matrix products, and give what is in force.

    Args:
        asked: that many; None for as many as there are cores, unless a variable of the
            environment (OPENBLAS_NUM_THREADS, OMP_NUM_THREADS, ...) says something else.
        cores: what this process may use; BLAS itself sees the machine, not the container.
    """
    from threadpoolctl import threadpool_info, threadpool_limits  # costs an import

    count = asked
    if count is None and not any(name in os.environ for name in _VARIABLES):
        count = cores
    if count is not None:
        threadpool_limits(limits=count, user_api="blas")
    used = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    return max(used, default=1)
