"""CuPy and NVRTC of CUDA 13, in an environment of their own, as far as a processor can tell.

The other tests run with CUDA 12: both cannot be installed together. It downloads some 200 MB.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cupaged.runtime.kernels import ARCHITECTURES, compile_kernel
from tests.gpu_tools import needs_nvrtc

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
COMPILES = "test_variants_compile_for_all"

REFUSED = """
from cupaged.runtime.cupy_runtime import CuPyRuntime
from cupaged.runtime.protocol import DeviceUnavailableError
try:
    CuPyRuntime()
except DeviceUnavailableError as error:
    print("refused:", error)
import cupy
print("runtime", cupy.cuda.runtime.runtimeGetVersion() // 1000)
"""
COMPILED = """
from cupaged.runtime.kernels import compile_kernel
print(compile_kernel("norm.cu", {"DTYPE": "bf16"}, "sm_80").path)
"""
RESOURCES = """
import sys
from cupaged.cli.main import main
sys.exit(main(["kernel", "resources", "gather_rows", "--arch", "sm_80", "sm_120"]))
"""


class Environment:
    """An environment beside the one of the tests, with the checkout on its path."""

    def __init__(self, folder: Path) -> None:
        self._python = folder / "bin" / "python"
        self._cache = folder / "cache"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Python, with a cache of its own and no GPU."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        here = {"PYTHONPATH": str(ROOT), "CUPAGED_CACHE_DIR": str(self._cache),
                "CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
        command = [str(self._python), *arguments]
        return subprocess.run(command, cwd=ROOT, env=kept | here, capture_output=True, text=True)

    def output(self, *arguments: str) -> str:
        """What Python says; it must end well."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def cuda13(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With what the extra `cuda13-jit` installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["optional-dependencies"]["cuda13-jit"],
        "numpy",
        "ml_dtypes",
        "msgspec",
        "pytest",
    ]
    environment = Environment(tmp_path_factory.mktemp("cuda13"))
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--retries", "1")
    installed = environment.run(*pip, *wanted)
    unreachable = re.search(r"connection broken by .*", installed.stderr)
    if installed.returncode and unreachable:
        pytest.skip(f"the package registry cannot be reached: {unreachable[0][:200]}")
    assert installed.returncode == 0, installed.stderr
    return environment


def test_a_machine_without_gpus_is_refused(cuda13: Environment) -> None:
    said = cuda13.output("-c", REFUSED)
    assert re.search(
        r"^refused: (there is no NVIDIA driver: install|no GPU can be used|GPU 0)", said
    )
    assert said.endswith("runtime 13\n")


def test_common_variants_compile_without_spills(cuda13: Environment) -> None:
    listed = tomllib.loads((ROOT / "cuda" / "variants.toml").read_text(encoding="utf-8"))
    count = len([*itertools.product(listed["variant"], ARCHITECTURES)])
    tests = "tests/unit/test_kernel_compile.py"
    options = ("-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=short")
    said = cuda13.output("-m", "pytest", tests, *options, "-k", COMPILES)
    assert re.search(rf"^{count} passed, \d+ deselected", said, re.MULTILINE), said


def test_resources_of_a_kernel(cuda13: Environment) -> None:
    lines = cuda13.output("-c", RESOURCES).splitlines()
    assert re.fullmatch(r"gather_rows\.cu +DTYPE=bf16 +NVRTC 13\.\d+", lines[0])
    assert lines[2].split()[:2] == ["gather_rows", "sm_80"] and lines[3].split()[0] == "sm_120"


@needs_nvrtc
def test_what_another_compiler_made_is_not_taken(
    cuda13: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in one cache; each finds its own again."""
    first = cuda13.output("-c", COMPILED).strip()
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(Path(first).parents[1]))
    other = str(compile_kernel("norm.cu", {"DTYPE": "bf16"}, "sm_80").path)
    assert Path(other).parent == Path(first).parent and other != first
    assert cuda13.output("-c", COMPILED).strip() == first
