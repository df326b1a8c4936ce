"""The built wheel, in an empty environment and another folder, answers a prompt."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from cupaged import __version__
from tests.tiny_models import TINY, write_hf_folder

ROOT = Path(__file__).resolve().parents[2]


def run_all(
    *command: str | Path, cwd: Path, more: dict[str, str] | None = None, fails: bool = False
) -> subprocess.CompletedProcess[str]:
    """A command in a bare environment and more variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **(more or {})},
        capture_output=True,
        text=True,
    )
    assert (done.returncode != 0) == fails, f"{command}: {done.stdout}{done.stderr}"
    return done


def run(*command: str | Path, cwd: Path, more: dict[str, str] | None = None) -> str:
    """Its output."""
    return run_all(*command, cwd=cwd, more=more).stdout


NO_COMPILER = {"CC": "false", "CXX": "false"}


def build_wheel(out: Path, more: dict[str, str] | None = None) -> Path:
    """From an sdist, as an installer does."""
    run(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out, more=more)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


def check_names(names: set[str]) -> None:
    """What is in a wheel, but for the kernels of the cpu device."""
    assert {"cupaged/py.typed", "cupaged/models/llama.py", "cupaged/cuda/README.md"} <= names
    assert {
        "cupaged/v1/model_pb2.py", "cupaged/v1/model_pb2.pyi", "cupaged/v1/model_pb2_grpc.pyi",
        "cupaged/server/compat/kserve.proto", "cupaged/server/compat/kserve.binpb",
        "cupaged/server/proto/cupaged/v1/model.proto", "cupaged/server/proto/cupaged_v1.binpb",
        "cupaged/examples/envoy/envoy.yaml",
    } <= names  # fmt: skip
    assert all(name.startswith(("cupaged/", f"cupaged-{__version__}.dist-info/")) for name in names)
    assert not any(name.startswith("cupaged/ops/native/") for name in names)
    assert not any(name.startswith("cupaged/cuda/") and name.endswith(".py") for name in names)


@pytest.mark.slow
def test_wheel_is_whole(wheel: Path) -> None:
    """The kernels in it are for any Python from 3.11 on."""
    assert wheel.name.startswith(f"cupaged-{__version__}-cp311-abi3-linux_")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "cupaged/ops/_native.abi3.so" in names
    check_names(names)


def test_wheel_without_a_compiler_has_all_the_rest(tmp_path: Path) -> None:
    names = set(zipfile.ZipFile(build_wheel(tmp_path, NO_COMPILER)).namelist())
    assert not any(name.endswith(".so") for name in names)
    check_names(names)


@pytest.mark.slow
def test_without_a_compiler_there_is_a_wheel_that_computes_with_numpy(tmp_path: Path) -> None:
    """Built in a folder of its own, where no older kernels lie."""
    checkout = tmp_path / "checkout"
    for name in ("cupaged", "cuda", "models"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", checkout, cwd=tmp_path, more=NO_COMPILER)
    model = write_hf_folder(tmp_path / "model", TINY)
    arguments = ("generate", model, "-p", "the cat", "--max-tokens", "8", "--ignore-eos")
    done = run_all(environment / "bin" / "cupaged", *arguments, cwd=tmp_path)
    assert done.stdout != "\n"
    (line,) = [text for text in done.stderr.splitlines() if "native kernels" in text]
    assert "were not built" in line and "NumPy computes" in line
    asked = ("--cpu-kernels", "native")
    refused = run_all(environment / "bin" / "cupaged", *arguments, *asked, cwd=tmp_path, fails=True)
    assert "cpu_kernels='native': the native kernels were not built" in refused.stderr


def test_every_package_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    inits = (ROOT / "cupaged").rglob("__init__.py")
    found = {".".join(path.relative_to(ROOT).parent.parts) for path in inits}
    assert listed == found | {"cupaged.cuda", "cupaged.models"}


@pytest.mark.slow
def test_wheel_generates_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile")
    run(*pip, wheel, cwd=tmp_path)
    model = write_hf_folder(tmp_path / "model", TINY)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = environment / "bin" / "cupaged"
    assert run(command, "--version", cwd=elsewhere).strip() == f"cupaged {__version__}"
    arguments = (model, "-p", "the cat", "--max-tokens", "8", "--ignore-eos", "-v")
    first = run(command, "generate", *arguments, cwd=elsewhere)
    again = run(python, "-m", "cupaged", "generate", *arguments, cwd=elsewhere)
    assert first == again != "\n"
    where = run(python, "-c", "import cupaged.models as m; print(m.__file__)", cwd=elsewhere)
    assert str(environment) in where


def test_editable_checkout_finds_its_models(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import cupaged.models; "
    code += "print(cupaged.models.__file__)"
    where = run(sys.executable, "-c", code, cwd=tmp_path)
    assert Path(where.strip()) == ROOT / "models" / "__init__.py"
