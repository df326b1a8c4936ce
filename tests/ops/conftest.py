"""The devices that kernels are tested on: the emulator always, with --gpu a GPU as well."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from cupaged.errors import CupagedError
from cupaged.runtime.cupy_runtime import CuPyRuntime
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.kernels import nvrtc_version, toolkit_headers
from cupaged.runtime.protocol import Runtime


@functools.cache
def gpu() -> CuPyRuntime | str:
    """The GPU, or why there is none to test on."""
    try:
        toolkit_headers(nvrtc_version()[0])
        return CuPyRuntime()
    except CupagedError as error:
        return str(error)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that takes this `runtime`, not one of its own, runs on each device there is."""
    if "runtime" in metafunc.fixturenames and not hasattr(metafunc.module, "runtime"):
        devices = ["emulated"] if isinstance(gpu(), str) else ["emulated", "cuda"]
        metafunc.parametrize("runtime", devices, indirect=True, scope="session")


def pytest_report_header() -> str:
    """Which devices the kernels are tested on."""
    found = gpu()
    return (
        f"kernels on: emulated (no GPU: {found}; --gpu lets the tests see one)"
        if isinstance(found, str)
        else "kernels on: emulated, cuda"
    )


@pytest.fixture(scope="session")
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """A device."""
    if request.param == "emulated":
        yield HostRuntime()
        return
    device = gpu()
    assert not isinstance(device, str)
    yield device
    device.synchronize()
