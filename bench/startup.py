"""How long it takes from the start of a process to the first token, and what memory loading takes.

The default model is measured as the GGUF it comes in and as a folder of bfloat16 safetensors made
of it. The limit to compare with is printed beside them: the time that the same run needs to fill as
many bytes of fresh memory as the weights take. `serve` is `cupaged serve` on the GGUF: from
its start to the moment when the health service says SERVING, and what its processes hold when
nobody has asked them anything. Writes bench/results/startup.json.

Run it with `python bench/startup.py` on an idle machine with a warm disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report
from bench.engine import import_seconds
from bench.serving_processes import ServedProcess, wait_serving
from cupaged.loading.model_files import open_model
from cupaged.loading.weights import read_entry, weight_bytes
from cupaged.ops.native_ops import NativeOps

RUNS = 5
IDLE_SECONDS = 2.0
CHILD = Path(__file__).parent / "startup_child.py"
CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}


def write_bfloat16(folder: Path) -> None:
    """The default model as config.json, tokenizer.json and model.safetensors in bfloat16."""
    files = open_model(None)
    config: dict[str, Any] = {key: getattr(files.config, name) for key, name in CONFIG_KEYS.items()}
    config |= {
        "architectures": [files.config.architecture],
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
        "eos_token_id": list(files.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(files.tokenizer.to_json())
    header: dict[str, Any] = {}
    pieces, offset = [], 0
    for entry in files.entries:
        weight, _ = read_entry(entry, files.reader, files.form)
        bits = weight.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        ends = np.cumsum([part.rows for part in entry.parts])[:-1]
        parts = [rounded] if entry.kind == "vector" else np.split(rounded, ends)
        for part, rounded in zip(entry.parts, parts, strict=True):
            header[f"{part.hf}.weight"] = {
                "dtype": "BF16",
                "shape": rounded.shape,
                "data_offsets": [offset, offset + rounded.nbytes],
            }
            offset += rounded.nbytes
            pieces.append(rounded.tobytes())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(pieces)


def measure(model: str) -> dict[str, float]:
    """One new process; seconds since its start."""
    environment = {**os.environ, "CUPAGED_BENCH_START": repr(time.time())}
    command = [sys.executable, str(CHILD), model]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def summary(model: str) -> dict[str, float]:
    """Medians of several runs, the first one left out: it warms the disk."""
    runs = [measure(model) for _ in range(RUNS + 1)][1:]
    return {key: round(median(run[key] for run in runs), 3) for key in runs[0]}


def serve_start() -> dict[str, Any]:
    """Of `cupaged serve`: seconds to SERVING, and memory of each process when idle."""
    runs = []
    for _ in range(RUNS + 1):
        with ServedProcess("--max-model-len", "2048") as server:
            wait_serving(server.address)
            serving_s = time.perf_counter() - server.started
            time.sleep(IDLE_SECONDS)
            runs.append((serving_s, server.memory_mb()))
    seconds, memory = zip(*runs[1:], strict=True)  # the first one warms the disk
    return {
        "serving_s": round(median(seconds), 3),
        "idle_memory": {
            role: {kind: median(run[role][kind] for run in memory) for kind in ("rss_mb", "pss_mb")}
            for role in memory[0]
        },
    }


def fresh_memory_seconds(num_bytes: int) -> float:
    """Time to fill that much memory which the process has not touched before."""
    code = (
        "import time, numpy as np; t = time.perf_counter(); "
        f"np.empty({num_bytes}, np.uint8).fill(1); print(time.perf_counter() - t)"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(3)]
    return round(median(map(float, runs)), 3)


def beside(model: str | None) -> dict[str, float]:
    """What to compare with: the weights as they are kept, and filling as much fresh memory."""
    files = open_model(model)
    num_bytes = weight_bytes(files.entries, files.reader, files.form, NativeOps())
    files.reader.close()
    return {
        "weights_mb": round(num_bytes / 1e6, 1),
        "fill_fresh_memory_s": fresh_memory_seconds(num_bytes),
    }


def main() -> None:
    """Measure, print, write."""
    results: dict[str, Any] = {"gguf": summary("") | beside(None)}
    with tempfile.TemporaryDirectory() as folder:
        write_bfloat16(Path(folder))
        results["bfloat16"] = summary(folder) | beside(folder)
    for format_ in ("gguf", "bfloat16"):
        peak = results[format_]["peak_growth_mb"] / results[format_]["weights_mb"]
        results[format_]["peak_over_weights"] = round(peak, 3)
    results["serve"] = serve_start()
    results["import_s"] = import_seconds("import cupaged")
    for name, value in results.items():
        print(f"{name:22} {value}")
    print(f"written: {report.write('startup', results)}")


if __name__ == "__main__":
    main()
