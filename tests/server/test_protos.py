"""The .proto files: linted, in step with what is made of them, and changed without breaks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from cupaged.sampling_params import MAX_BIAS, MAX_SAMPLES, MAX_STRINGS, SamplingParams
from cupaged.server.conversions import MAX_DETOKENIZE_IDS, MAX_MESSAGES, MAX_STRING_CHARS
from cupaged.v1 import admin_pb2, generation_pb2, model_pb2
from tests.server.make_protos import DESCRIPTOR_SET, PROTOS, ROOT, proto_files

BUF = Path(sys.executable).with_name("buf")
BREAKING = 100  # buf's exit code for findings
STUBS = {m.DESCRIPTOR.name: m.DESCRIPTOR for m in (admin_pb2, generation_pb2, model_pb2)}
# Fields of SamplingParams that have other names on the wire.
OTHER_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
OPTIONS = ("SamplingOptions", "StoppingOptions", "OutputOptions")


def buf(*arguments: str | Path, folder: Path = PROTOS) -> subprocess.CompletedProcess[str]:
    """Run buf in a folder of .proto files."""
    command = [str(BUF), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def committed() -> dict[str, FileDescriptorProto]:
    """The files of the committed descriptor set by their names."""
    found = FileDescriptorSet.FromString((ROOT / DESCRIPTOR_SET).read_bytes())
    return {file.name: file for file in found.file}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileDescriptorProto]:
    """What buf makes of the .proto files, with their comments."""
    out = tmp_path_factory.mktemp("buf") / "set.binpb"
    done = buf("build", "-o", out, "--as-file-descriptor-set")
    assert done.returncode == 0, done.stderr
    return {file.name: file for file in FileDescriptorSet.FromString(out.read_bytes()).file}


def messages(files: dict[str, FileDescriptorProto]) -> dict[str, DescriptorProto]:
    """Every message of cupaged.v1 by its name."""
    return {m.name: m for name in STUBS for m in files[name].message_type}


def comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Comments by the path of what they stand before, on one line each."""
    return {
        tuple(place.path): " ".join(place.leading_comments.split())
        for place in file.source_code_info.location
    }


def field_comments(
    files: dict[str, FileDescriptorProto],
) -> dict[str, tuple[FieldDescriptorProto, str]]:
    """`Message.field` to the field and its comment."""
    return {
        f"{message.name}.{field.name}": (field, told.get((4, i, 2, j), ""))
        for name in STUBS
        for told in (comments(files[name]),)
        for i, message in enumerate(files[name].message_type)
        for j, field in enumerate(message.field)
    }


def test_there_are_three_files() -> None:
    assert proto_files() == sorted(STUBS)
    assert set(committed()) - set(STUBS) == {
        "google/protobuf/duration.proto",
        "google/protobuf/timestamp.proto",
    }


@pytest.mark.parametrize("name", sorted(STUBS))
def test_stubs_are_in_step_with_the_descriptor_set(name: str) -> None:
    stub = FileDescriptorProto.FromString(STUBS[name].serialized_pb)
    assert stub == without_json_names(committed()[name])


@pytest.mark.parametrize("name", sorted(STUBS))
def test_proto_files_are_in_step_with_the_descriptor_set(
    name: str, compiled: dict[str, FileDescriptorProto]
) -> None:
    file = FileDescriptorProto.FromString(compiled[name].SerializeToString())
    file.ClearField("source_code_info")
    assert without_json_names(file) == without_json_names(committed()[name])


def without_json_names(file: FileDescriptorProto) -> FileDescriptorProto:
    """A copy as compilers put it into stubs."""
    copy = FileDescriptorProto.FromString(file.SerializeToString())
    for message in copy.message_type:
        for kind in (message, *message.nested_type):
            for field in kind.field:
                field.ClearField("json_name")
    return copy


def test_lint_and_format_find_nothing() -> None:
    for command in (("lint",), ("format", "--diff", "--exit-code")):
        done = buf(*command)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_breaks_against_the_committed_set() -> None:
    done = buf("breaking", "--against", ROOT / DESCRIPTOR_SET)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("double top_p = 2;", "double nucleus = 2;", 'changed name from "top_p" to "nucleus"'),
        ("string cache_salt = 11;", "string cache_salt = 31;", 'field "11" with name "cache_salt"'),
        ("int32 num_preemptions = 4;", "int64 num_preemptions = 4;", "changed type"),
        ("optional int32 n = 9;", "int32 n = 9;", "cardinality"),
        ("rpc Abort(", "rpc Cancel(", 'RPC "Abort"'),
        ("FINISH_REASON_ERROR = 4;", "FINISH_REASON_ERROR = 5;", 'enum value "4"'),
        (
            "returns (stream GenerateStreamResponse)",
            "returns (GenerateStreamResponse)",
            "streaming",
        ),
        ("TokenIds", "Tokens", 'message "TokenIds"'),
    ],
)
def test_a_change_that_breaks_clients_is_found(
    tmp_path: Path, before: str, after: str, told: str
) -> None:
    done = changed(tmp_path, before, after)
    assert done.returncode == BREAKING and told.lower() in done.stdout.lower(), done.stdout


def test_a_new_field_breaks_nobody(tmp_path: Path) -> None:
    more = "repeated uint32 ids = 1;\n  // New.\n  string origin = 2;"
    assert changed(tmp_path, "repeated uint32 ids = 1;", more).returncode == 0


def changed(folder: Path, before: str, after: str) -> subprocess.CompletedProcess[str]:
    """Compare the committed set with files in which a text of generation.proto is another."""
    copy = shutil.copytree(PROTOS, folder / "protos")
    path = copy / "cupaged" / "v1" / "generation.proto"
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")
    return buf("breaking", "--against", ROOT / DESCRIPTOR_SET, folder=copy)


def test_a_default_that_is_not_zero_can_be_told_from_zero(
    compiled: dict[str, FileDescriptorProto],
) -> None:
    told = field_comments(compiled)
    marked = 0
    for name, (field, comment) in told.items():
        assert comment, f"{name} has no comment"
        if field.type == field.TYPE_MESSAGE or field.label == field.LABEL_REPEATED:
            continue
        defaults = re.findall(r"Default (\S+?)[.:;]?(?:\s|$)", comment)
        if set(defaults) - {"0", "false"} or "Absent" in comment:
            assert field.proto3_optional, f"{name} is absent or zero: which?"
            marked += 1
    assert marked >= 12


def test_whole_and_streamed_requests_have_the_same_fields() -> None:
    found = messages(committed())
    whole, streamed = (
        [without_numbers_of_oneofs(field) for field in found[name].field]
        for name in ("GenerateRequest", "GenerateStreamRequest")
    )
    assert streamed[:-1] == whole and streamed[-1].name == "stream"


def without_numbers_of_oneofs(field: FieldDescriptorProto) -> FieldDescriptorProto:
    copy = FieldDescriptorProto.FromString(field.SerializeToString())
    copy.ClearField("oneof_index")
    return copy


def test_every_sampling_parameter_has_one_place() -> None:
    found = messages(committed())
    fields = [field.name for name in OPTIONS for field in found[name].field]
    assert len(fields) == len(set(fields))
    names = set(SamplingParams.field_names()) - {"structured_outputs"}
    assert set(fields) == {OTHER_NAMES.get(n, n) for n in names} | {"token_ids", "echo"}


def test_the_limits_in_the_comments_are_the_real_ones(
    compiled: dict[str, FileDescriptorProto],
) -> None:
    told = field_comments(compiled)
    for name in ("SamplingOptions.bad_words", "StoppingOptions.stop"):
        limits = f"At most {MAX_STRINGS}, none empty, none above {MAX_STRING_CHARS} characters"
        assert limits in " ".join(told[name][1].split())
    assert f"From 1 to {MAX_SAMPLES}" in told["SamplingOptions.n"][1]
    assert f"From 1 to {MAX_MESSAGES}" in told["Chat.messages"][1]
    assert f"At most {MAX_DETOKENIZE_IDS}" in told["DetokenizeRequest.token_ids"][1]
    assert f"In [-{MAX_BIAS:g}, {MAX_BIAS:g}]" in told["SamplingOptions.logit_bias"][1]
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n"):
        default = getattr(SamplingParams(), name)
        assert f"Default {default:g}" in told[f"SamplingOptions.{name}"][1]


def test_kept_numbers_are_free(compiled: dict[str, FileDescriptorProto]) -> None:
    kept = 0
    for name in STUBS:
        told = comments(compiled[name])
        for i, message in enumerate(compiled[name].message_type):
            used = {field.number for field in message.field}
            text = told[(4, i)].partition("umber")[2]
            for low, high in re.findall(r"(\d+)(?: to (\d+))? (?:are |is )?(?:kept )?for", text):
                assert not used & set(range(int(low), int(high or low) + 1)), message.name
                kept += 1
    assert kept >= 8
