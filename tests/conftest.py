"""Before anything imports NumPy: one BLAS thread, in the tests and in the programs they start.

Several threads beside another busy process wait for each other and take many times as long.

And no GPU, unless the run asks for one: what device "auto" finds must not depend on the machine.

And programs that the tests start hear signals: a shell ignores Ctrl-C for what it starts in the
background, `nohup` ignores SIGHUP, and that is handed on, but a handler is not.
"""

from __future__ import annotations

import os
import signal

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        _is_interrupt = _number is signal.SIGINT
        signal.signal(_number, signal.default_int_handler if _is_interrupt else lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu", action="store_true", help="let the tests see GPUs; kernels are tested there too"
    )


def pytest_configure(config: pytest.Config) -> None:
    """CUDA reads the variable once, when CuPy asks for devices, which is later."""
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
