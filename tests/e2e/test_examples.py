"""Every example runs, and every block of code in the README does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import TINY, write_hf_folder

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(
    path.stem
    for path in (ROOT / "cupaged" / "examples").glob("*.py")
    if path.stem not in ("__init__", "live_display", "demo_serve")
    and not path.stem.startswith("grpc_")  # these, and demo_serve: tests/server
)
README = re.sub(  # what needs a server: tests/server
    r"^## Serve over gRPC\n.*?(?=^## )", "", (ROOT / "README.md").read_text(), flags=re.M | re.S
)
BLOCKS = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", README, re.M | re.S)
PYTHON_BLOCKS = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [
    line
    for language, code in BLOCKS
    if language == ""
    for line in code.splitlines()
    if re.match(r"(echo .*\| )?cupaged ", line)
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_folder(tmp_path_factory.mktemp("model"), TINY))


def run(command: list[str], **settings: object) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        command,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        **settings,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return str(done.stdout)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, model: str) -> None:
    assert run([sys.executable, "-m", f"cupaged.examples.{name}", model]).strip()


def test_priorities_are_what_the_example_says(model: str) -> None:
    lines = run([sys.executable, "-m", "cupaged.examples.priorities", model]).splitlines()
    assert lines.index(next(line for line in lines if line.startswith("Alarm!"))) < 2


def test_the_readme_has_code_and_commands() -> None:
    assert PYTHON_BLOCKS and len(COMMANDS) >= 4


@pytest.mark.parametrize("code", PYTHON_BLOCKS)
def test_python_of_the_readme(code: str, tmp_path: Path) -> None:
    assert "Paris" in run([sys.executable, "-c", code], cwd=tmp_path)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_of_the_readme(line: str, model: str, tmp_path: Path) -> None:
    line = line.replace("MODEL", model)
    shell = f'cupaged() {{ {sys.executable} -m cupaged "$@"; }}\n{line}'
    run(["bash", "-c", shell], cwd=tmp_path)
