"""The engine on a GPU's kernels, emulated: against `cpu`, under all checks, and what is refused."""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged import engine_args
from cupaged.emulator import build
from cupaged.emulator.errors import ToolchainError
from cupaged.engine_args import EngineArgs
from cupaged.errors import CapacityError, ConfigError, CupagedError, NotSupportedError
from cupaged.llm import LLM
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.outputs import RequestOutput
from cupaged.runtime import cupy_runtime
from cupaged.runtime.errors import CompilerUnavailableError
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.protocol import DeviceMemoryError, DeviceUnavailableError
from cupaged.sampling_params import SamplingParams
from tests.e2e.cli import Inline
from tests.fast_runtime import FastRuntime, fast_ops
from tests.forced import LoadedModel
from tests.tiny_models import TINIER, TINY, TINY_WIDE_HEAD, TinyLlama, write_hf_folder
from tests.unit.fake_cupy import FakeGpu, install

MARGIN = 1e-3  # of two logits, beyond which the devices must agree which is larger
SPECS = {spec.name: spec for spec in (TINY, TINY_WIDE_HEAD, TINIER)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {name: write_hf_folder(place / name, spec) for name, spec in SPECS.items()}


@pytest.fixture
def tiny(folders: dict[str, Path]) -> Path:
    return folders["tiny"]


def prompts_of(spec: TinyLlama, lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(29)
    return [rng.integers(3, spec.vocab_size, length).tolist() for length in lengths]


# ---- against the processor -----------------------------------------------------------------------

Forced = list[tuple[list[int], list[int]]]
LENGTHS = (1, 2, 15, 16, 17, 33, 48)
NUM_TOKENS = 6


@functools.cache
def on_cpu(folder: Path) -> tuple[Forced, NDArray[np.float32]]:
    """Prompts with the tokens that `cpu` takes after them, and its logits before each."""
    prompts = prompts_of(SPECS[folder.name], LENGTHS)
    llm = LLM(folder, device="cpu", num_gpu_blocks_override=64, max_model_len=128)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(asked, greedy, use_tqdm=False)
    runs = [(p, o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    return runs, np.vstack(LoadedModel(folder).forced_logits(runs))


@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("name", ["tiny", "tiny_wide_head"])
def test_float32_agrees_with_cpu(name: str, chunk: int, folders: dict[str, Path]) -> None:
    runs, expected = on_cpu(folders[name])
    model = LoadedModel(folders[name], fast_ops("float32"))
    got = np.vstack(model.forced_logits(runs, max_num_batched_tokens=chunk, num_blocks=64))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    ordered = np.sort(expected, axis=1)
    clear = ordered[:, -1] - ordered[:, -2] > MARGIN
    assert clear.sum() > 0.9 * len(LENGTHS) * NUM_TOKENS
    np.testing.assert_array_equal(got[clear].argmax(axis=1), expected[clear].argmax(axis=1))


@pytest.mark.parametrize(
    ("dtype", "unit"),
    [pytest.param("float16", 2.0**-11, marks=pytest.mark.slow), ("bfloat16", 2.0**-8)],
)
def test_types_of_16_bits_are_near_to_cpu(dtype: str, unit: float, tiny: Path) -> None:
    """An error of some roundings, in the mean over all logits."""
    runs, expected = on_cpu(tiny)
    model = LoadedModel(tiny, fast_ops(dtype))
    got = np.vstack(model.forced_logits(runs, num_blocks=64))
    error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
    assert unit / 8 < error < 16 * unit


# ---- the public way ------------------------------------------------------------------------------


def generate(llm: LLM) -> list[RequestOutput]:
    """Two requests, three samples; the engine must be idle and whole afterwards."""
    asked: list[Any] = [{"prompt_token_ids": ids} for ids in prompts_of(TINIER, (5, 18))]
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(
            n=2, temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=4, max_tokens=3,
            ignore_eos=True, logprobs=2,
        ),
    ]  # fmt: skip
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert llm.get_stats().num_used_blocks == 0
    llm.engine.core.audit()
    return outputs


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (o.prompt_logprobs, [(s.token_ids, s.text, s.logprobs) for s in o.outputs]) for o in outputs
    ]


def test_all_checks_find_nothing(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """`LLM(device="emulated")`, prompts in chunks, and the same bits as without the checks."""
    from cupaged.runtime import host_runtime

    limits: dict[str, Any] = {
        "num_gpu_blocks_override": 16, "max_model_len": 64, "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }  # fmt: skip
    llm = LLM(folders["tinier"], device="emulated", **limits)
    runtime = llm.engine.core._runner.inner._ops.runtime  # type: ignore[attr-defined]
    assert type(runtime._runtime) is HostRuntime and runtime._mode == "checked"
    checked = told(generate(llm))
    monkeypatch.setattr(host_runtime, "HostRuntime", FastRuntime)
    fast = told(generate(LLM(folders["tinier"], device="emulated", dtype="bfloat16", **limits)))
    assert checked == fast
    assert len({tuple(tokens) for _, samples in fast for tokens, _, _ in samples}) == 3


def test_auto_is_the_models_own_type_of_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupaged.runtime import host_runtime

    monkeypatch.setattr(host_runtime, "HostRuntime", FastRuntime)
    limits: dict[str, Any] = {"num_gpu_blocks_override": 4, "max_model_len": 32}
    for stored, expected in (("float16", "float16"), ("float32", "bfloat16")):
        folder = write_hf_folder(tmp_path / stored, TINY, dtype=stored)  # type: ignore[arg-type]
        core = EngineArgs(model=folder, device="emulated", **limits).build().core
        assert core._runner.inner._ops.dtype.name == expected  # type: ignore[attr-defined]


# ---- what is refused, before a weight is read ----------------------------------------------------


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights is a failure."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights are read before the check")

    monkeypatch.setattr(engine_args, "load_model", fail)


def refused(folder: Path, error: type[CupagedError], **options: Any) -> str:
    """The message, which is one line."""
    with pytest.raises(error) as caught:
        LLM(folder, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cpu_computes_in_float32_only(dtype: str, tiny: Path) -> None:
    message = refused(tiny, NotSupportedError, device="cpu", dtype=dtype)
    assert message == f"dtype={dtype!r} is not supported on cpu; use 'float32' or 'auto'"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device must be 'auto' or one of cpu, emulated, cuda, got 'tpu'"),
        ({"device": None}, "device must be 'auto' or one of cpu, emulated, cuda, got None"),
        (
            {"dtype": "int8"},
            "dtype must be 'auto' or one of float32, float16, bfloat16, got 'int8'",
        ),
        ({"dtype": np.float16}, "dtype must be 'auto' or one of"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be a number > 0 and <= 1"),
        ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization must be a number > 0 and <= 1"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be a number > 0"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization must be a number > 0"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be a number > 0"),
        ({"block_size": 12, "device": "emulated"}, "block_size must be one of (8, 16, 32, 64, 12"),
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any], message: str, tiny: Path) -> None:
    assert refused(tiny, ConfigError, **options).startswith(message)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("head_dim", [8, 24, 272])
def test_a_head_that_no_kernel_serves(head_dim: int, tmp_path: Path) -> None:
    """Refused on a GPU's kernels, before weights are read, and served on `cpu`."""
    folder = write_hf_folder(tmp_path, replace(TINY, head_dim=head_dim, num_layers=1))
    message = refused(folder, NotSupportedError, device="emulated")
    assert message.startswith(f"attention with head_dim {head_dim} is not supported; supported: 16")
    with pytest.raises(AssertionError, match="weights are read"):
        LLM(folder, device="cpu")


@pytest.mark.usefixtures("no_weights")
def test_query_heads_that_no_kernel_groups(tmp_path: Path) -> None:
    """The configuration itself says no, on every device."""
    folder = write_hf_folder(tmp_path, TINY)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    for device in ("cpu", "emulated"):
        assert "num_attention_heads" in refused(folder, ConfigError, device=device)


# ---- what is missing on the machine --------------------------------------------------------------


@pytest.mark.usefixtures("no_weights")
def test_cuda_without_cupy(tiny: Path, cupaged: Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # an import of it fails
    message = refused(tiny, DeviceUnavailableError, device="cuda")
    assert message.startswith("CuPy cannot be imported")
    assert message.endswith("`pip install 'cupaged[cuda12]'` (or [cuda13]) brings it")
    done = cupaged("generate", str(tiny), "-p", "a", "--device", "cuda")
    assert (done.code, done.out, done.err) == (1, "", f"cupaged: {message}\n")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A machine with CuPy, and a GPU that tests spoil."""
    return install(FakeGpu(), monkeypatch)


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"driver_version": 0}, "there is no NVIDIA driver"),
    ({"driver_version": 11080}, "the NVIDIA driver serves CUDA 11.8, and this CuPy needs CUDA 12"),
    ({"count": 0}, "GPU 0 is not there: 0 visible"),
    ({"count": -1}, "no GPU can be used: cudaErrorNoDevice"),
    ({"name": b"Tesla T4", "capability": (7, 5)}, "Tesla T4 is of compute capability 7.5; cupaged"),
]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("changes", "message"), UNUSABLE)
def test_a_gpu_that_cannot_be_used(
    changes: dict[str, Any], message: str, gpu: FakeGpu, tiny: Path
) -> None:
    for name, value in changes.items():
        setattr(gpu, name, value)
    assert refused(tiny, DeviceUnavailableError, device="cuda").startswith(message)


@pytest.mark.parametrize(("changes", "message"), UNUSABLE)
def test_auto_goes_on_without_such_a_gpu(
    changes: dict[str, Any],
    message: str,
    gpu: FakeGpu,
    tiny: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And says why, in one line of the log."""
    for name, value in changes.items():
        setattr(gpu, name, value)
    with caplog.at_level(logging.INFO, logger="cupaged.devices"):
        core = EngineArgs(model=tiny, num_gpu_blocks_override=4, max_model_len=32).build().core
    assert isinstance(core._runner.inner._ops, NumpyOps)  # type: ignore[attr-defined]
    (line,) = (r.getMessage() for r in caplog.records if r.name == "cupaged.devices")
    assert line.startswith(f"device auto: cpu, because {message}")


def test_another_process_holds_the_memory(
    gpu: FakeGpu, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start, or from after the plan was made."""
    gpu.pool_counts, gpu.memory = (0, 0, 0), (1 << 20, 1 << 30)  # free, total
    message = refused(tiny, CapacityError, device="cuda")
    assert re.fullmatch(
        r"model weights in bytes must be at most 0 \(free memory\), got \d+", message
    )
    gpu.memory = (1 << 30, 1 << 30)
    gpu.memory_is_full = True
    message = refused(tiny, DeviceMemoryError, device="cuda")
    assert re.fullmatch(
        r"no memory for the weights: 'embed': 196608 bytes for an array \[512, 192\] of bfloat16 "
        r"do not fit on NVIDIA A100, where 1073741824 bytes are free: .*; use a type of fewer .*",
        message,
    )


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_gpu_without_a_compiler(
    device: str, gpu: FakeGpu, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is there and lacks what compiles kernels is no reason to fall back silently."""

    def compile_kernel(*_: object) -> None:
        raise CompilerUnavailableError("NVRTC is not installed")

    monkeypatch.setattr(cupy_runtime, "compile_kernel", compile_kernel)
    message = refused(tiny, CompilerUnavailableError, device=device)
    assert message == "NVRTC is not installed"


@pytest.mark.usefixtures("no_weights")
def test_emulated_without_a_compiler(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_compiler() -> None:
        raise ToolchainError("no C++ compiler")

    monkeypatch.setattr(build, "find_compiler", find_compiler)
    assert refused(tiny, ToolchainError, device="emulated") == "no C++ compiler"
