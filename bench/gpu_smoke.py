"""What a GPU does with the kernels, in under two minutes: right, equal in bits, and how fast.

    python bench/gpu_smoke.py [--device N]     needs a GPU and CuPy
    python bench/gpu_smoke.py --dry-run        the same code on the emulator, with small sizes

Sections: primitives (emulator equals device), operations (tests/ops on the device), bits (batches
and chunks change none), speed (shares of the measured copy and product), model (SmolLM2 against
`cpu`). One that fails is reported, and the others go on. Prints a table, writes one JSON file to
bench/results/gpu/ (a dry run only where --output says), and exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import report
from bench.gpu_smoke_bits import bits, operations
from bench.gpu_smoke_checks import Check, Checks, Device
from bench.gpu_smoke_model import model
from bench.gpu_smoke_primitives import primitives
from bench.gpu_smoke_speed import speed
from cupaged.errors import CupagedError
from cupaged.runtime.cupy_runtime import CuPyRuntime
from cupaged.runtime.host_runtime import HostRuntime

Section = Callable[[Device], Checks]
SECTIONS: dict[str, Section] = {
    "primitives": primitives, "operations": operations, "bits": bits, "speed": speed,
    "model": model,
}  # fmt: skip
_WORDS = {True: "ok", False: "FAILED", None: ""}


def run_section(name: str, section: Section, device: Device) -> dict[str, Any]:
    """Its checks up to an error, which ends this section alone."""
    started = time.perf_counter()
    checks: list[Check] = []
    error = None
    try:
        for check in section(device):
            checks.append(check)
            _print(name, check)
    except Exception:  # whatever it is, it is reported and the other sections count
        error = traceback.format_exc()
        last = error.strip().splitlines()[-1]
        _print(name, Check("error", last, False, {}))
    if not checks and error is None:
        error = "nothing was checked"
        _print(name, Check("error", error, False, {}))
    failed = error is not None or any(check.passed is False for check in checks)
    return {
        "status": "failed" if failed else "passed",
        "seconds": round(time.perf_counter() - started, 2),
        "error": error,
        "checks": [asdict(check) for check in checks],
    }


def _print(section: str, check: Check) -> None:
    print(f"{section:11} {check.name:38} {_WORDS[check.passed]:7} {check.said}", flush=True)


def open_device(dry_run: bool, index: int) -> Device:
    """The GPU, or the emulator in a mode and an order that its counterpart does not have.

    Raises:
        DeviceUnavailableError: there is no GPU that can be used.
    """
    if dry_run:
        return Device(HostRuntime(mode="plain", seed=1), HostRuntime(), True)
    return Device(CuPyRuntime(index), HostRuntime(), False)


def describe(device: Device) -> dict[str, Any]:
    """The device and the packages that compile for it."""
    properties, memory = device.runtime.properties, device.runtime.memory_info()
    packages = {}
    for name in ("cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        **asdict(properties),
        "memory_bytes": memory.total_bytes,
        "free_bytes": memory.free_bytes,
        "packages": packages,
    }


def main(argv: list[str] | None = None) -> int:
    """Run, print, write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dry-run", action="store_true", help="on the emulator, with small sizes")
    parser.add_argument("--device", type=int, default=0, help="which GPU, default 0")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--output", type=Path, help="the JSON file")
    asked = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        device = open_device(asked.dry_run, asked.device)
    except CupagedError as error:
        print(f"no GPU: {error}", file=sys.stderr)
        return 2
    about = describe(device)
    print(f"{about['name']} ({about['arch']}, {about['multiprocessors']} multiprocessors)")
    print(f"{'SECTION':11} {'CHECK':38} {'RESULT':7}")
    sections = {name: run_section(name, SECTIONS[name], device) for name in asked.sections}
    failed = [name for name, section in sections.items() if section["status"] == "failed"]
    seconds = time.perf_counter() - started
    times = ", ".join(f"{name} {section['seconds']:.0f} s" for name, section in sections.items())
    print(f"{len(failed)} of {len(sections)} sections failed; {seconds:.0f} s: {times}")
    results = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "dry_run": asked.dry_run,
        "device": about,
        "seconds": round(seconds, 1),
        "sections": sections,
        "machine": report.machine(),
    }
    path = asked.output
    if path is None and not asked.dry_run:
        name = re.sub(r"[^A-Za-z0-9]+", "-", about["name"]).strip("-").lower()
        path = report.RESULTS / "gpu" / f"{name}-{results['date'][:10]}.json"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n")
        print(f"written to {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
