"""Which GPUs and drivers serve, and how much memory is left: pure functions of plain numbers.

They know no CuPy and ask no device, so that every case can be tested where there is none.
"""

from __future__ import annotations

from cupaged.runtime.protocol import DeviceUnavailableError

__all__ = ["check_driver", "free_bytes", "kernel_arch"]

# Cubins run on later minor revisions of their own major revision, and on no other.
_ARCHITECTURES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
_FIRST_DRIVER = {12: "525.60.13", 13: "580.65.06"}  # by major version of CUDA


def free_bytes(
    total: int, driver_free: int, pool_used: int, pool_free: int, pool_limit: int = 0
) -> int:
    """Bytes that can still be allocated; never negative.

    Args:
        total: memory of the device.
        driver_free: what the driver calls free.
        pool_used, pool_free: what the pool has handed out, and what it keeps for later.
        pool_limit: most that the pool may hold, 0 if there is no limit. What it keeps counts.
    """
    free = min(driver_free + pool_free, total - pool_used)
    if pool_limit:
        free = min(free, pool_limit - pool_used)
    return max(0, free)


def check_driver(driver_version: int, runtime_version: int) -> None:
    """Versions as CUDA counts them: 12040 is 12.4; a driver of 0 is none.

    Raises:
        DeviceUnavailableError: no driver, or one for an older major version than CuPy was made for.
    """
    if not driver_version:
        raise DeviceUnavailableError(
            "there is no NVIDIA driver: install one, or start the container with its GPUs "
            "(`docker run --gpus all`)"
        )
    needed = runtime_version // 1000
    if driver_version // 1000 < needed:
        first = _FIRST_DRIVER.get(needed)
        raise DeviceUnavailableError(
            f"the NVIDIA driver serves CUDA {_version(driver_version)}, and this CuPy needs CUDA "
            f"{needed}: update the driver{f' to {first} or later' if first else ''}"
        )


def kernel_arch(name: str, major: int, minor: int) -> str:
    """The architecture to compile for: the nearest known one whose code the GPU runs.

    Raises:
        DeviceUnavailableError: the GPU is older than sm_80, or of a generation that is not known.
    """
    if (major, minor) < _ARCHITECTURES[0]:
        raise DeviceUnavailableError(
            f"{name} is of compute capability {major}.{minor}; cupaged needs 8.0 (Ampere) or later"
        )
    fitting = [known for known in _ARCHITECTURES if known[0] == major and known[1] <= minor]
    if not fitting:
        known_names = ", ".join(f"sm_{a}{b}" for a, b in _ARCHITECTURES)
        raise DeviceUnavailableError(
            f"{name} is of compute capability {major}.{minor}; the kernels know {known_names}"
        )
    return "sm_{}{}".format(*max(fitting))


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
