"""The default model's weights for each engine: the same numbers, in the files that each reads.

`weights` "file" is the GGUF as it was installed. "float32" is what those numbers are when decoded:
for llama.cpp a GGUF, made by the `gguf` package, and for engines that read Hugging Face folders
safetensors, made with the project's own reader. They are written once into the work folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from cupaged.loading.gguf import GGUFFile
from cupaged.loading.gguf_config import hf_config_from_gguf
from cupaged.loading.model_files import find_model, open_model
from cupaged.loading.weights import read_entry


def installed_gguf() -> Path:
    """The file as it came."""
    return find_model(None)


def float32_gguf(source: Path, folder: Path) -> Path:
    """A GGUF with every tensor of the source's in F32."""
    return _once(folder / "float32.gguf", source, _write_gguf)


def float32_folder(source: Path, folder: Path) -> Path:
    """A folder with config.json and safetensors. It has no tokenizer: prompts are token ids."""
    return _once(folder / "float32", source, _write_folder)


def _once(path: Path, source: Path, write: Callable[[Path, Path], None]) -> Path:
    """Write what is not there; what was interrupted never gets its name."""
    if not path.exists():
        print(f"writing {path}", flush=True)
        unfinished = path.with_name(f"unfinished-{path.name}")
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        write(source, unfinished)
        unfinished.rename(path)
    return path


def _write_gguf(source: Path, path: Path) -> None:
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, stored in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = stored.types[-1] if len(stored.types) > 1 else None
        writer.add_key_value(name, stored.contents(), stored.types[0], sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_folder(source: Path, path: Path) -> None:
    files = open_model(source)
    assert isinstance(files.reader, GGUFFile)
    tensors: dict[str, NDArray[np.float32]] = {}
    for entry in files.entries:
        weight, bias = read_entry(entry, files.reader, files.form)
        assert bias is None, f"{entry.name} has a bias"
        first = 0
        for part in entry.parts:
            rows = weight if entry.kind == "vector" else weight[first : first + part.rows]
            tensors[f"{part.hf}.weight"] = np.ascontiguousarray(rows)
            first += part.rows
    config = hf_config_from_gguf(files.reader)
    rope = {name: value for name, value in config["rope_parameters"].items() if value is not None}
    config |= {
        "model_type": "llama", "hidden_act": "silu", "dtype": "float32",
        "rope_parameters": {"rope_type": "default", **rope},
    }  # fmt: skip
    files.reader.close()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
