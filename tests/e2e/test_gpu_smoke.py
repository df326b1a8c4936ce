"""`bench/gpu_smoke.py` without a GPU: its dry run, and that it notices what it is there for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench import gpu_smoke
from bench.gpu_smoke_bits import bits, read_result
from bench.gpu_smoke_checks import Check, Checks, Device, same
from bench.gpu_smoke_primitives import primitives
from bench.gpu_smoke_speed import Clock
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.protocol import Array, DeviceUnavailableError, Runtime


class Flipped(HostRuntime):
    """A device on which the first element of every result has the wrong sign or bits."""

    def to_host(self, array: Array) -> NDArray[Any]:
        host = super().to_host(array)
        host.reshape(-1).view(np.uint8)[:4] ^= 0xC0
        return host


class Uneven(HostRuntime):
    """A device on which every other launch leaves the first element of its output wrong."""

    launches = 0

    def launch(self, kernel: Any, grid: Any, block: Any, args: Any, **options: Any) -> None:
        super().launch(kernel, grid, block, args, **options)
        self.launches += 1
        if self.launches % 2:
            host = self.to_host(args[0])
            host.reshape(-1).view(np.uint8)[:4] ^= 0x10
            self.copy_to_device(args[0], host)


def device(runtime: Runtime) -> Device:
    return Device(runtime, HostRuntime(), dry_run=True)


def run(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = gpu_smoke.main(["--dry-run", "--output", str(path / "out.json"), *arguments])
    results: dict[str, Any] = json.loads((path / "out.json").read_text())
    return code, results


# Names in the manual of PTX that kernels use, and what their contracts rest on.
PRIMITIVES = {
    "mma_f16", "mma_bf16", "mma_s8", "ldmatrix_x1", "ldmatrix_x2", "ldmatrix_x4",
    "ldmatrix_x1_trans", "ldmatrix_x2_trans", "ldmatrix_x4_trans", "cp.async 4", "cp.async 8",
    "cp.async 16", "cp.async 4, zeros", "cp.async 8, zeros", "cp.async 16, zeros",
    "cp.async groups", "shuffles and votes", "warp and block sums", "float arithmetic",
    "conversions", "library functions",
}  # fmt: skip


def test_primitives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, results = run(tmp_path, "--sections", "primitives")
    assert code == 0
    section = results["sections"]["primitives"]
    assert {check["name"] for check in section["checks"]} == PRIMITIVES
    assert all(check["passed"] for check in section["checks"])
    assert (section["status"], section["error"]) == ("passed", None)
    assert results["dry_run"] and results["device"]["arch"] == "sm_90"
    table = capsys.readouterr().out
    assert all(f" {name} " in table for name in PRIMITIVES)


def test_another_result_of_any_primitive_is_noticed() -> None:
    checks = list(primitives(device(Flipped(mode="plain"))))
    assert {check.name for check in checks if check.passed is False} == PRIMITIVES


def test_every_wrapper_of_ptx_is_there() -> None:
    """What `ptx.cuh` has for the device is called in the kernels of the primitives."""
    folder = Path(gpu_smoke.__file__).parents[1]
    header = (folder / "cuda" / "ptx.cuh").read_text()
    source = (folder / "bench" / "gpu_smoke_primitives.cu").read_text()
    wrappers = {
        line.split("(")[0].split()[-1]
        for line in header.splitlines()
        if line.startswith("__device__")
    }
    assert len(wrappers) >= 14
    assert {name for name in wrappers if name not in source} == set()


SAID = """\
tests/ops/test_x.py::test_a[cuda-1] PASSED                               [ 25%]
tests/ops/test_x.py::test_a[cuda-2] PASSED                               [ 50%]
tests/ops/test_x.py::test_b[cuda] SKIPPED (why)                          [ 75%]
"""
FAILED = "tests/ops/test_x.py::test_c[cuda] FAILED                    [100%]\n"


@pytest.mark.parametrize(
    ("said", "code", "passed", "words"),
    [
        (SAID, 0, True, "2 passed, 0 failed"),
        (SAID, None, True, "2 passed, 0 failed, stopped after 9 s"),
        (SAID + FAILED, 1, False, "2 passed, 1 failed, tests/ops/test_x.py::test_c[cuda]"),
        (SAID + FAILED, None, False, "test_c[cuda], stopped after 9 s"),
        (SAID, -11, False, "2 passed, 0 failed"),  # it crashed
        ("", None, False, "0 passed, 0 failed, stopped"),
        ("no tests ran", 5, False, "0 passed, 0 failed, no tests ran"),
        ("No module named pytest", 1, False, "0 passed"),
    ],
)
def test_tests_are_counted(said: str, code: int | None, passed: bool, words: str) -> None:
    check = read_result("test_x", said, code, 9)
    assert check.passed is passed and words in check.said


@pytest.mark.slow
def test_bits_that_differ_are_noticed() -> None:
    checks = list(bits(device(Uneven(mode="plain"))))
    failed = [check.name for check in checks if check.passed is False]
    assert any("products" in name for name in failed)
    assert any("attention" in name for name in failed)


def test_nothing_computed_is_not_equal() -> None:
    zeros = np.zeros(4, np.float32)
    assert same("", zeros, zeros).passed is False
    assert same("", np.arange(4), np.arange(4)).passed
    nan = np.array([np.nan, 1], np.float32)
    assert same("", nan, nan).passed
    assert same("", np.array([0.0, 1]), np.array([-0.0, 1])).said == "1 of 2 elements differ"


def test_sections_fail_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(device: Device) -> Checks:
        yield Check("first", "fine", True, {})
        raise RuntimeError("it broke")

    def differs(device: Device) -> Checks:
        yield Check("second", "1 of 2 elements differ", False, {"differ": 1})

    def measures(device: Device) -> Checks:
        yield Check("third", "7 GB/s", None, {"gb_per_s": 7})

    def nothing(device: Device) -> Checks:
        yield from ()

    sections = {"a": breaks, "b": differs, "c": nothing, "d": measures}
    monkeypatch.setattr(gpu_smoke, "SECTIONS", sections)
    code, results = run(tmp_path)
    assert code == 1
    found = {name: section["status"] for name, section in results["sections"].items()}
    assert found == {"a": "failed", "b": "failed", "c": "failed", "d": "passed"}
    assert "RuntimeError: it broke" in results["sections"]["a"]["error"]
    assert [check["name"] for check in results["sections"]["a"]["checks"]] == ["first"]
    assert results["sections"]["b"]["checks"][0]["values"] == {"differ": 1}
    assert "3 of 4 sections failed" in capsys.readouterr().out
    monkeypatch.setattr(gpu_smoke, "SECTIONS", {"d": measures})
    assert run(tmp_path)[0] == 0


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(index: int) -> None:
        raise DeviceUnavailableError(f"GPU {index} is not there")

    monkeypatch.setattr(gpu_smoke, "CuPyRuntime", refuse)
    assert gpu_smoke.main(["--device", "3"]) == 2
    said = capsys.readouterr()
    assert said.err == "no GPU: GPU 3 is not there\n" and not said.out


def test_times_are_those_between_events() -> None:
    """The clock moves by 1 ms whenever it is read, and by 250 ms a launch."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-3
        return now[0]

    def launch(i: int) -> None:
        now[0] += 0.25

    timed = Clock(device(HostRuntime(mode="plain", clock=clock)))
    assert timed.milliseconds(launch, 4) == pytest.approx(250 + 1 / 4)


@pytest.mark.slow
def test_the_dry_run(tmp_path: Path) -> None:
    code, results = run(tmp_path)
    failed = {
        name: section["error"] or section["checks"]
        for name, section in results["sections"].items()
        if section["status"] != "passed"
    }
    assert code == 0 and not failed
    assert list(results["sections"]) == ["primitives", "operations", "bits", "speed", "model"]
    names = {check["name"] for s in results["sections"].values() for check in s["checks"]}
    assert {"copy", "best product", "tokens, float32", "draws of a batch and alone"} <= names
