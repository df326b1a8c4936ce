"""How models on the hub are written, and which files of a repository make up one."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupaged.errors import CheckpointError, ConfigError, ModelNotFoundError, NotSupportedError
from cupaged.loading.hub_files import HubFile, choose_files, shown_size
from cupaged.loading.hub_name import HubName, parse_model_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", HubName("HuggingFaceTB/SmolLM2-135M-Instruct")),
        ("a/b.c_d-1", HubName("a/b.c_d-1")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        (f"org/name@{COMMIT}", HubName("org/name", COMMIT)),
        ("org/name:Q4_K_M", HubName("org/name", "main", "Q4_K_M")),
        ("org/name:q8_0", HubName("org/name", "main", "q8_0")),
        ("org/name:UD-IQ2_XXS", HubName("org/name", "main", "UD-IQ2_XXS")),
        ("org/name:bf16", HubName("org/name", "main", "bf16")),
        ("org/name:file.gguf", HubName("org/name", "main", "file.gguf")),
        ("org/name@rev:sub/File.GGUF", HubName("org/name", "rev", "sub/File.GGUF")),
        ("org/name@rev:Q4_K_M", HubName("org/name", "rev", "Q4_K_M")),
    ],
)
def test_names(text: str, expected: HubName) -> None:
    assert parse_model_name(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "name", "a/b/c", "/a/b", "./a", "../a/b", "~/a", "C:\\models\\a", "a\\b", "a/b.gguf",
        "a/model.safetensors", "@v1", ":Q4_0", "a@b/c", "x" * 10_000, "a\0b",
    ],
)  # fmt: skip
def test_what_reads_like_a_path(text: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no such file or folder.*owner/name:Q4_K_M"):
        parse_model_name(text)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("org/", "where owner and name"),
        ("/".join(("org", "x" * 97)), "where owner and name"),
        ("org/na--me", "without '--'"),
        ("org/na..me", "without '--'"),
        ("org/-name", "where owner and name"),
        ("org/name-", "where owner and name"),
        ("org/name.git", "where owner and name"),
        ("org/na me", "where owner and name"),
        ("org/näme", "where owner and name"),
        ("org/name\n", "where owner and name"),
        ("org/name@", "a branch, a tag or a commit"),
        ("org/name@../x", "a branch, a tag or a commit"),
        ("org/name@a..b", "a branch, a tag or a commit"),
        ("org/name@/x", "a branch, a tag or a commit"),
        ("org/name@x/", "a branch, a tag or a commit"),
        ("org/name@a b", "a branch, a tag or a commit"),
        ("org/name:", "a quantisation such as Q4_K_M"),
        ("org/name:M", "a quantisation such as Q4_K_M"),
        ("org/name:file.bin", "a quantisation such as Q4_K_M"),
        ("org/name:../x.gguf", "a quantisation such as Q4_K_M"),
        ("org/name:/x.gguf", "a quantisation such as Q4_K_M"),
        ("org/name:Q4_K_M@v1", "a quantisation such as Q4_K_M"),
    ],
)
def test_malformed_names(text: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match="model name must be") as caught:
        parse_model_name(text)
    assert allowed in caught.value.allowed and caught.value.value == text


def test_what_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org").mkdir()
    Path("org/name:Q4_0").touch()
    with pytest.raises(ConfigError, match="this is a file or folder here"):
        parse_model_name("org/name:Q4_0")


# ---- the choice of files -------------------------------------------------------------------------


def chosen(files: str, name: str = "org/name", index: str = "{}") -> str:
    """Names of the files that are chosen from a list of names."""
    listed = [HubFile(file, 7) for file in files.split()]
    picked = choose_files(parse_model_name(name), listed, lambda file: index.encode())
    return " ".join(file.name for file in picked)


INDEX = "model.safetensors.index.json"
REST = "pytorch_model.bin original/params.json onnx/model.onnx README.md flax_model.msgpack"


def test_one_file_of_weights() -> None:
    small = "config.json generation_config.json tokenizer.json tokenizer_config.json"
    more = "special_tokens_map.json chat_template.jinja additional_chat_templates/tools.jinja"
    wanted = f"{small} {more} model.safetensors"
    shuffled = " ".join(reversed(f"{wanted} {INDEX} model-1-of-1.safetensors {REST}".split()))
    assert chosen(shuffled) == wanted
    assert chosen(f"config.json model.safetensors {REST}") == "config.json model.safetensors"


def test_shards_in_order() -> None:
    index = '{"metadata": {}, "weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}'
    files = f"b.safetensors a.safetensors c.safetensors {INDEX} config.json {REST}"
    assert chosen(files, index=index) == f"config.json {INDEX} a.safetensors b.safetensors"
    with pytest.raises(ModelNotFoundError, match=r"names a\.safetensors, .* \(1 of 2 shards"):
        chosen(f"b.safetensors {INDEX} config.json", index=index)


@pytest.mark.parametrize(
    "index",
    [
        "", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"x": 1}}',
        '{"weight_map": {"x": "../a.safetensors"}}', '{"weight_map": {"x": "model.bin"}}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_index(index: str) -> None:
    with pytest.raises(CheckpointError, match=INDEX):
        chosen(f"config.json {INDEX}", index=index)


def test_an_index_that_is_too_large() -> None:
    listed = [HubFile("config.json", 2), HubFile(INDEX, 100_000_001)]
    with pytest.raises(CheckpointError, match="must have at most 100000000"):
        choose_files(HubName("org/name"), listed, lambda file: b"{}")


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("Q4_K_M", "x-Q4_K_M.gguf"),
        ("q4_k_m", "x-Q4_K_M.gguf"),
        ("Q4_K", "x.Q4_K.gguf"),
        ("Q4_0", "x-q4_0.gguf"),
        ("IQ4_XS", "x-IQ4_XS.gguf"),
        ("Q4_XS", "x_Q4_XS-imat.gguf"),
        ("F16", "sub-F16/x-F16.gguf"),
        ("UD-Q2_K_XL", "x-UD-Q2_K_XL.gguf"),
        ("x.Q4_K.gguf", "x.Q4_K.gguf"),
        ("mmproj-x-F16.gguf", "mmproj-x-F16.gguf"),
    ],
)
def test_the_gguf_file_of_a_tag(tag: str, file: str) -> None:
    files = (
        "config.json x-Q4_K_M.gguf x.Q4_K.gguf x-q4_0.gguf x-IQ4_XS.gguf x_Q4_XS-imat.gguf "
        "sub-F16/x-F16.gguf sub-F16/x-Q6_K.gguf mmproj-x-F16.gguf x-UD-Q2_K_XL.gguf "
        "x-Q8_0-00001-of-00002.gguf x-Q8_0-00002-of-00002.gguf"
    )
    assert chosen(files, f"org/name:{tag}") == file


def test_a_gguf_file_that_is_not_clear() -> None:
    files = "a-Q4_K_M.gguf b-Q4_K_M.gguf c-Q8_0.gguf"
    with pytest.raises(ModelNotFoundError) as caught:
        chosen(files, "org/name:Q4_K_M")
    assert str(caught.value) == (
        "org/name:Q4_K_M: 2 GGUF files match 'Q4_K_M'; there are: a-Q4_K_M.gguf (7 B), "
        "b-Q4_K_M.gguf (7 B)"
    )
    everything = r"there are: a-Q4_K_M\.gguf \(7 B\), b-Q4_K_M\.gguf \(7 B\), c-Q8_0\.gguf \(7 B\)$"
    for tag in ("Q5_0", "A-Q4_K_M.gguf"):
        with pytest.raises(ModelNotFoundError, match=f"no GGUF file matches '{tag}'; {everything}"):
            chosen(files, f"org/name:{tag}")


def test_a_long_list_is_cut() -> None:
    files = " ".join(f"x{number}-Q4_0.gguf" for number in range(50))
    with pytest.raises(ModelNotFoundError, match=r"x39-Q4_0\.gguf \(7 B\) and 10 more$"):
        chosen(files, "org/name:Q4_0")


def test_parts_of_a_split_gguf() -> None:
    files = "x-Q8_0-00001-of-00002.gguf x-Q8_0-00002-of-00002.gguf"
    for tag in ("Q8_0", "x-Q8_0-00001-of-00002.gguf"):
        with pytest.raises(NotSupportedError, match="parts of a split model"):
            chosen(files, f"org/name:{tag}")


def test_a_repository_without_a_model() -> None:
    with pytest.raises(ModelNotFoundError, match=r"only GGUF.*org/name:Q4_K_M.*a\.gguf \(7 B\)$"):
        chosen("a.gguf config.json")
    with pytest.raises(NotSupportedError, match="PyTorch pickles"):
        chosen("config.json pytorch_model-00001-of-00002.bin")
    with pytest.raises(ModelNotFoundError, match=r"neither model\.safetensors nor"):
        chosen("README.md")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        chosen("model.safetensors")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (269_060_552, "256.6 MiB"),
     (16 * 2**30, "16.0 GiB"), (2**41, "2048.0 GiB")],
)  # fmt: skip
def test_sizes_for_people(size: int, text: str) -> None:
    assert shown_size(size) == text
