"""The shape of the code: who may import whom, how long a file may be, what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 450
CORE_PATH_LINES = 4850

# A module may import from its own layer and from the layers above it in this list, never from those
# below: the first names are the foundations. The longest matching prefix decides.
LAYERS = (
    ("cupaged._version", "cupaged.errors"),
    ("cupaged.v1",),
    (
        "cupaged.interrupts",
        "cupaged.json_values",
        "cupaged.sampling_params",
        "cupaged.outputs",
        "cupaged.resources",
    ),
    ("cupaged.client",),
    ("cupaged.runtime.cache_folder",),
    ("cupaged.emulator",),
    ("cupaged.runtime",),
    ("cupaged.logits_rules", "cupaged.rope"),
    ("cupaged.config", "cupaged.request"),
    ("cupaged.engine.sequence_table", "cupaged.engine.block_names", "cupaged.engine.pool_usage"),
    (
        "cupaged.engine.sampling_batch",
        "cupaged.engine.door",
        "cupaged.engine.prefix_cache",
        "cupaged.engine.block_history",
        "cupaged.engine.token_digests",
        "cupaged.engine.host_pool",
        "cupaged.engine.preemption",
        "cupaged.engine.radix_cache",
    ),
    ("cupaged.engine.scheduling_policy",),
    ("cupaged.engine.batch", "cupaged.engine.block_manager"),
    ("cupaged.engine.swapping", "cupaged.engine.offloading"),
    ("cupaged.ops", "cupaged.engine.scheduler"),
    ("cupaged.loading",),
    ("cupaged.models",),
    (
        "cupaged.engine.device_memory",
        "cupaged.engine.kv_memory",
        "cupaged.engine.started_step",
        "cupaged.engine.warm_up",
    ),
    ("cupaged.engine.cost_measurement",),
    ("cupaged.engine.runner", "cupaged.engine.hash_runner", "cupaged.engine.simulated_runner"),
    ("cupaged.engine.kv_shadow", "cupaged.engine.kv_sanitizer"),
    ("cupaged.engine.beam_search", "cupaged.engine.beams"),
    ("cupaged.engine.step_results",),
    ("cupaged.engine.core",),
    ("cupaged.engine",),
    ("cupaged.estimate", "cupaged.devices", "cupaged.engine_args"),
    ("cupaged.llm",),
    ("cupaged.server",),
    ("cupaged.benchmarks",),
    ("cupaged.cli",),
    ("cupaged.__main__", "cupaged.examples"),
)
# The package's own `__init__` names the public classes, for `from cupaged import LLM`.
PUBLIC = "cupaged"
CUPY_MODULES = {"cupaged.runtime.cupy_runtime", "cupaged.runtime.kernels"}
NO_ARRAYS_OF_A_DEVICE = (
    "cupaged.config", "cupaged.request", "cupaged.engine.scheduler",
    "cupaged.engine.block_manager", "cupaged.engine.batch",
)  # fmt: skip
# What a token passes through on its way: request, schedule, batch, forward, sample, append.
CORE_PATH = (
    "cupaged/request.py", "cupaged/logits_rules.py", "cupaged/engine/door.py",
    "cupaged/engine/scheduler.py", "cupaged/engine/scheduling_policy.py",
    "cupaged/engine/block_manager.py", "cupaged/engine/prefix_cache.py",
    "cupaged/engine/radix_cache.py",
    "cupaged/engine/batch.py", "cupaged/engine/sequence_table.py",
    "cupaged/engine/sampling_batch.py", "cupaged/engine/runner.py",
    "cupaged/engine/started_step.py", "cupaged/engine/core.py", "cupaged/engine/step_results.py",
    "cupaged/ops/numpy_step.py",
    "models/llama.py", "cupaged/ops/__init__.py", "cupaged/ops/numpy_ops.py",
    "cupaged/ops/numpy_attention.py", "cupaged/ops/numpy_sampling.py", "cupaged/ops/philox.py",
)  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module of the package by its import name; `models/` is `cupaged.models`."""
    found = {}
    for folder, package in (("cupaged", "cupaged"), ("models", "cupaged.models")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            found[name] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(name: str) -> int:
    """Index of the layer; the longest prefix wins."""
    matches = [
        (len(prefix), layer)
        for layer, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if name == prefix or name.startswith(prefix + ".")
    ]
    assert matches, f"{name} belongs to no layer: add it to LAYERS"
    return max(matches)[1]


MODULES = modules()


def test_the_walk_finds_the_code() -> None:
    assert {"cupaged.engine.core", "cupaged.models.llama", "cupaged.llm"} <= set(MODULES)


@pytest.mark.parametrize("name", sorted(set(MODULES) - {PUBLIC}))
def test_imports_go_downwards(name: str) -> None:
    for imported in imports(MODULES[name]):
        if not imported.startswith("cupaged.") and imported != "cupaged":
            continue
        target = imported if imported in MODULES else imported.rpartition(".")[0]
        if target == PUBLIC:
            assert name.startswith("cupaged.examples"), f"{name} imports the package itself"
            continue
        assert layer_of(target) <= layer_of(name), f"{name} imports {target}, which is above it"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_torch_and_cupy_in_two_modules_only(name: str) -> None:
    top = {imported.partition(".")[0] for imported in imports(MODULES[name])}
    assert not top & {"torch", "jax", "transformers", "gguf"}
    assert "cupy" not in top or name in CUPY_MODULES
    if name in NO_ARRAYS_OF_A_DEVICE:
        assert "cupy" not in top


def test_lines_per_file() -> None:
    files = [
        path
        for pattern in ("*.py", "*.cu", "*.cuh", "*.h", "*.cpp")
        for folder in ("cupaged", "models", "cuda", "tests", "bench")
        for path in (ROOT / folder).rglob(pattern)
        if "_pb2" not in path.name
    ]
    lines = {str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines()) for p in files}
    print("\n".join(f"{n:5} {name}" for name, n in sorted(lines.items(), key=lambda x: -x[1])))
    assert not {name: n for name, n in lines.items() if n > MAX_LINES}
    assert sum(lines[name] for name in CORE_PATH) <= CORE_PATH_LINES
    assert lines["models/llama.py"] <= 150


def test_no_python_file_in_cuda() -> None:
    assert not list((ROOT / "cuda").rglob("*.py"))


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, cupaged; print(*sorted(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(run.stdout.split())
    assert not loaded & {"numpy", "tokenizers", "jinja2", "safetensors", "cupy", "grpc", "tqdm"}


def test_loading_the_class_does_not_import_what_only_some_need() -> None:
    code = "import sys; from cupaged import LLM; print(*sorted(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not set(run.stdout.split()) & {"jinja2", "cupy", "grpc", "torch", "tqdm"}
