"""`models`, `doctor`, `estimate` and `completion`."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cupaged import __version__
from cupaged.cli import checks, surroundings
from cupaged.cli.checks import Finding
from cupaged.cli.completion import read_verbs
from cupaged.cli.main import build_parser
from cupaged.loading.dequantize import BLOCK_TYPES
from tests.e2e.cli import Inline, environment, shell
from tests.fake_hub import Repo
from tests.unit.small_hub import go_offline, small_hub

OFFLINE = ("doctor", "--offline")


def test_models_lists_the_registry_and_the_tables(cupaged: Inline) -> None:
    done = cupaged("models", "--json")
    found = json.loads(done.out)
    registry = import_module("cupaged.models").REGISTRY
    listed = [name for family in found["families"] for name in family["architectures"]]
    assert sorted(listed) == sorted(registry)
    assert all(family["description"] for family in found["families"])
    assert found["weights"]["GGUF"] == [known.name for known in BLOCK_TYPES.values()]
    assert set(found["weights"]["safetensors"]) == {"F32", "F16", "BF16"}
    text = cupaged("models")
    assert text.code == 0 and max(map(len, text.out.splitlines())) <= 100
    for name in (*listed, *found["weights"]["GGUF"]):
        assert name in text.out


def test_doctor_has_a_verdict_for_each_thing(cupaged: Inline) -> None:
    done = cupaged(*OFFLINE, "--json")
    report = json.loads(done.out)
    assert done.code == 0 and report["ok"] is True and report["cupaged"] == __version__
    names = [finding["name"] for finding in report["findings"]]
    for name in (
        "cupaged", "Python", "numpy", "tokenizers", "grpcio-status", "grpcio-health-checking",
        "protobuf", "system", "processor", "cores", "memory",
        "native kernels",
        "BLAS", "environment", "devices", "CuPy", "CUDA headers", "C++ compiler", "default model",
        "hub cache", "free disk", "hub",
    ):  # fmt: skip
        assert name in names
    assert {f["verdict"] for f in report["findings"]} <= {"ok", "note"}
    assert all(f["advice"] for f in report["findings"] if f["verdict"] != "ok")
    (hub,) = (f for f in report["findings"] if f["name"] == "hub")
    assert "was not asked (--offline)" in hub["value"]


def test_doctor_fits_a_terminal_and_is_also_called_collect_env(
    cupaged: Inline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = cupaged(*OFFLINE)
    assert done.code == 0 and done.err == "" and "\x1b" not in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert done.out.endswith("no problem: cupaged can run on cpu\n")
    assert cupaged("collect-env", "--offline").out.splitlines()[0] == done.out.splitlines()[0]


def test_doctor_fails_when_a_package_is_broken(
    cupaged: Inline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        checks, "_requirements", lambda: [("no-such-package", "1.0"), ("numpy", "99.1")]
    )
    done = cupaged(*OFFLINE)
    assert done.code == 1 and done.out.endswith("2 problems: cupaged will not run like this\n")
    assert f"problem  {'no-such-package':24}cannot be imported: ModuleNotFoundError" in done.out
    assert "-> pip install 'numpy>=99.1'" in done.out


def test_doctor_shows_no_secrets(cupaged: Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:pass@proxy")
    done = cupaged(*OFFLINE)
    assert "HF_TOKEN (set), HTTPS_PROXY (set)" in " ".join(done.out.split())
    assert "hf_secret" not in done.out and "pass@" not in done.out


def test_a_check_that_breaks_is_a_finding(cupaged: Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> list[Finding]:
        raise RuntimeError("no idea")

    monkeypatch.setattr(surroundings, "check_gpu", breaks)
    done = cupaged(*OFFLINE)
    assert done.code == 0 and "cannot be looked at: RuntimeError: no idea" in done.out


def test_doctor_reads_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        surroundings,
        "_output",
        lambda *command: "NVIDIA L4, 550.54.15, 23034 MiB, 8.9" if "nvidia" in command[0] else "",
    )
    (gpu,) = (f for f in surroundings.check_gpu() if f.name.startswith("GPU"))
    assert gpu == Finding("GPU 0", "NVIDIA L4, 23034 MiB, compute 8.9, driver 550.54.15")


def test_a_hub_that_does_not_answer_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub = list(surroundings.check_hub(offline=False))[-1]
    assert hub.verdict == "note" and "Connection refused" in hub.value
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub = list(surroundings.check_hub(offline=False))[-1]
    assert hub.verdict == "ok" and "HF_HUB_OFFLINE is set" in hub.value


def llama_3_8b() -> dict[str, Any]:
    """The published config.json, as far as it matters."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder that holds nothing but config.json."""
    (tmp_path / "config.json").write_text(json.dumps(llama_3_8b()))
    return str(tmp_path)


def test_estimate_needs_nothing_but_config_json(cupaged: Inline, llama: str) -> None:
    done = cupaged("estimate", llama, "--gpu", "L4", "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert found["dtype"] == "bfloat16" and found["num_parameters"] == 8_030_261_248
    assert found["weight_bytes"] == 16_060_522_496 and found["kv_bytes_per_token"] == 131_072
    # 0.92 of 23,034 MiB, less weights and workspace, in blocks of 2 MiB: 3 times 8,192 tokens.
    assert found["memory_bytes"] == int(23034 * 2**20 * 0.92)
    left = found["memory_bytes"] - found["weight_bytes"] - found["workspace_bytes"]
    assert found["num_blocks"] == left // (16 * 131_072)
    assert found["num_requests"] == found["num_blocks"] // 512 == 5
    assert found == json.loads(
        cupaged("estimate", f"{llama}/config.json", "--gpu=l4", "--json").out
    ) | {"model": llama}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--gpu", "L4"), 0, "fits: 5 requests of 8192 tokens at the same time"),
        (("--gpu", "T4"), 1, "does not fit: weights and workspace leave no room for one block"),
        (("--gpu-memory-gib", "17.2"), 1, "; one of 5568 does: use --max-model-len 5568"),
        (("--gpu-memory-gib", "17.2", "--max-model-len", "5568"), 0, "fits: 1 request of 5568"),
        (("--gpu", "H200", "--dtype", "float32"), 0, "in float32 on H200 of 140.4 GiB"),
        (("--gpu", "T4", "--gpu-memory-gib", "48"), 0, "in float16 on T4 of 48.0 GiB"),
        (("--gpu", "list"), 0, "T4          15.0 GiB  no bfloat16"),
    ],
)
def test_estimate_gives_a_verdict(
    cupaged: Inline, llama: str, arguments: tuple[str, ...], code: int, says: str
) -> None:
    done = cupaged("estimate", llama, *arguments)
    assert (done.code, done.err) == (code, "") and says in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "L5"), "--gpu must be one of T4, V100-16"),
        (("--gpu", "T4", "--dtype", "bfloat16"), "dtype must be float16 or float32 on this GPU"),
        (("--gpu", "T4", "--dtype", "int8"), "dtype must be 'auto' or one of float32"),
        (("--gpu", "T4", "--max-model-len", "8193"), "at most the model's own limit, 8192"),
        (("--gpu", "T4", "--max-model-len", "0"), "max_model_len must be an integer >= 1"),
        (("--gpu", "T4", "--block-size", "-1"), "block_size must be an integer >= 1"),
        (("--gpu-memory-gib", "-1"), "--gpu-memory-gib must be a number > 0"),
        (("--gpu-memory-gib", "nan"), "--gpu-memory-gib must be a number > 0"),
        (("--gpu", "T4", "--gpu-memory-utilization", "2"), "must be a number in (0, 1]"),
        (("--gpu-memory-utilization", "0.5"), "given together with a GPU"),
    ],
)
def test_estimate_refuses(
    cupaged: Inline, llama: str, arguments: tuple[str, ...], message: str
) -> None:
    done = cupaged("estimate", llama, *arguments)
    assert (done.code, done.out) == (2, "") and message in done.err


def test_estimate_of_a_broken_folder(cupaged: Inline, tmp_path: Path) -> None:
    done = cupaged("estimate", str(tmp_path))
    assert done.code == 1 and "config.json: no such file; an estimate needs one" in done.err
    (tmp_path / "config.json").write_text("[]")
    assert "must hold a JSON object" in cupaged("estimate", str(tmp_path)).err
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read as JSON" in cupaged("estimate", str(tmp_path)).err
    (tmp_path / "config.json").write_text('{"architectures": ["Unheard"]}')
    assert cupaged("estimate", str(tmp_path)).code in (1, 2)


def test_estimate_for_this_machine_agrees_with_the_engine(cupaged: Inline, cli_model: str) -> None:
    from cupaged.devices import Device
    from cupaged.engine_args import EngineArgs
    from cupaged.loading.model_files import open_model
    from cupaged.ops.numpy_ops import NumpyOps

    args = ("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "32")
    found = json.loads(cupaged("estimate", cli_model, *args, "--json").out)
    options = EngineArgs(
        model=cli_model,
        device="cpu",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=32,
    )
    files = open_model(cli_model)
    assert found["weight_bytes"] == 4 * files.num_parameters
    device = Device("cpu", NumpyOps(), 0, True, "")
    assert found["workspace_bytes"] == options._workspace_bytes(files, 256, device)
    config = options.build().core.config
    assert (found["num_blocks"], found["num_requests"]) == (config.num_blocks, 4)
    files.reader.close()


def test_estimate_of_a_name_downloads_config_json_alone(
    cupaged: Inline, llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Path(llama, "config.json").read_bytes()
    with small_hub(tmp_path / "home", monkeypatch) as hub:
        hub.repos["meta/eight"] = Repo({"config.json": config, "model.safetensors": b"never"})
        asked = ("estimate", "meta/eight", "--gpu", "L4", "--json")
        done = cupaged(*asked)
        assert done.code == 0 and json.loads(done.out)["weight_bytes"] == 16_060_522_496
        assert not hub.bodies("safetensors") and hub.bodies("config.json")
        go_offline(monkeypatch)
        assert cupaged(*asked).out == done.out  # the cache has it
        missing = cupaged("estimate", "meta/nine")
        assert missing.code == 1 and "HF_HUB_OFFLINE" in missing.err
        quantised = cupaged("estimate", "meta/eight:Q4_K_M")
        assert quantised.code == 1 and "run `cupaged pull meta/eight:Q4_K_M`" in quantised.err


def bash_completes(*words: str) -> set[str]:
    """What bash offers for the last word of a line."""
    line = " ".join(f"'{word}'" for word in words)
    script = f"""
source <("$@" completion bash)
COMP_WORDS=({line}) COMP_CWORD={len(words) - 1}
_cupaged
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = shell(script)
    assert (done.returncode, done.stderr) == (0, b"")
    return set(done.stdout.decode().split())


def test_bash_completes_commands_options_and_files(tmp_path: Path) -> None:
    assert bash_completes("cupaged", "") >= {"generate", "run-batch", "completion"}
    assert bash_completes("cupaged", "es") == {"estimate"}
    assert bash_completes("cupaged", "chat", "--max-t") == {"--max-tokens"}
    assert bash_completes("cupaged", "completion", "") == {"bash", "zsh", "fish"}
    assert bash_completes("cupaged", "chat", "--seed", "") == set()
    (tmp_path / "model.gguf").touch()
    for words in (("chat", "-m"), ("generate", "--file"), ("estimate",)):
        found = bash_completes("cupaged", *words, f"{tmp_path}/mod")
        assert found == {str(tmp_path / "model.gguf")}


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_scripts_know_every_option_and_are_valid(
    cupaged: Inline, name: str, tmp_path: Path
) -> None:
    script = cupaged("completion", name)
    assert (script.code, script.err) == (0, "")
    for verb in read_verbs(build_parser()):
        assert verb.name in script.out and verb.help
        for flag in verb.flags:
            for spelt in flag.names:
                assert (spelt if name != "fish" else spelt.lstrip("-")) in script.out
    if shutil.which(name) is None:
        return
    (tmp_path / "script").write_text(script.out)
    done = subprocess.run([name, "-n", str(tmp_path / "script")], env=environment())
    assert done.returncode == 0


def test_completion_knows_what_takes_a_value() -> None:
    verbs = {verb.name: verb for verb in read_verbs(build_parser())}
    flags = {name: flag for flag in verbs["generate"].flags for name in flag.names}
    assert flags["--file"].takes_file and flags["--model"].takes_file
    assert flags["--seed"].takes_value and not flags["--seed"].takes_file
    assert not flags["--json"].takes_value and not flags["--ignore-eos"].takes_value
    assert verbs["chat"].takes_file and not verbs["doctor"].takes_file
    assert isinstance(build_parser(), argparse.ArgumentParser)
