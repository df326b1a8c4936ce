"""Before anything imports NumPy: one BLAS thread, in the tests and in the programs they start.

Several threads beside another busy process wait for each other and take many times as long.

And no GPU, unless the run asks for one: what device "auto" finds must not depend on the machine.

And Ctrl-C is heard: a shell starts programs in the background with that signal ignored, which they
hand on to those that they start.
"""

from __future__ import annotations

import os
import signal

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu", action="store_true", help="let the tests see GPUs; kernels are tested there too"
    )


def pytest_configure(config: pytest.Config) -> None:
    """CUDA reads the variable once, when CuPy asks for devices, which is later."""
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
