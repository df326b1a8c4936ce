"""`cupaged proto`: what it writes, shows and refuses."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from cupaged.server.descriptor_set import descriptor_set
from cupaged.server.proto_files import all_files
from tests.e2e.cli import Inline
from tests.server.make_protos import COMPATIBLE, PROTOS

NAMES = ("admin.proto", "generation.proto", "model.proto")
OTHERS = ("kserve.proto", "vllm.proto")
OWN_SERVICES = [f"cupaged.v1.{name}Service" for name in ("Admin", "Generation", "Model")]


@pytest.fixture
def cupaged(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Inline:
    """The command, in this process."""
    return Inline(monkeypatch, capfdbinary)


def defined() -> list[Any]:
    """Services, messages and enums of all descriptor sets, in one pool."""
    pool = DescriptorPool()
    for file in descriptor_set().file:
        pool.Add(file)
    files = [pool.FindFileByName(file.name) for file in all_files()]
    kinds = ("services_by_name", "message_types_by_name", "enum_types_by_name")
    return [each for f in files for kind in kinds for each in getattr(f, kind).values()]


def test_export_writes_what_a_compiler_takes(cupaged: Inline, tmp_path: Path) -> None:
    folder = tmp_path / "for others"
    done = cupaged("proto", "export", str(folder))
    own = {folder / "cupaged" / "v1" / name: PROTOS / "cupaged" / "v1" / name for name in NAMES}
    sources = {**own, **{folder / name: COMPATIBLE / name for name in OTHERS}}
    assert (done.code, done.err) == (0, "")
    *wrote, empty, example = done.out.splitlines()
    assert wrote == [f"wrote {path}" for path in sources] and not empty
    for path, source in sources.items():
        assert path.read_bytes() == source.read_bytes()
    assert {p for p in folder.rglob("*") if p.is_file()} == set(sources)
    words = shlex.split(example.removeprefix("for example: "))
    assert words[:3] == ["protoc", "-I", str(folder)]
    assert words[-1] == str(folder / "cupaged" / "v1" / "*.proto")
    buf = Path(sys.executable).with_name("buf")
    out = tmp_path / "set.binpb"
    subprocess.run([buf, "build", folder, "-o", out], check=True, timeout=60)
    assert out.stat().st_size > 10_000


def test_export_again_changes_nothing(cupaged: Inline, tmp_path: Path) -> None:
    cupaged("proto", "export", str(tmp_path))
    path = tmp_path / "cupaged" / "v1" / NAMES[0]
    before = path.stat().st_mtime_ns, path.stat().st_ino
    done = cupaged("proto", "export", str(tmp_path))
    assert done.code == 0 and done.out.count("unchanged ") == 5 and "wrote" not in done.out
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_export_leaves_other_contents_alone_unless_forced(cupaged: Inline, tmp_path: Path) -> None:
    own = tmp_path / "cupaged" / "v1" / "model.proto"
    own.parent.mkdir(parents=True)
    own.write_text("// mine\n", encoding="utf-8")
    done = cupaged("proto", "export", str(tmp_path))
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        f"cupaged: {own}: is there already and differs; nothing was written; --force replaces it\n"
    )
    assert [p.name for p in own.parent.iterdir()] == ["model.proto"]
    assert own.read_text(encoding="utf-8") == "// mine\n"
    done = cupaged("proto", "export", str(tmp_path), "--force")
    assert done.code == 0 and f"replaced {own}\n" in done.out and done.out.count("wrote ") == 4
    assert own.read_bytes() == (PROTOS / "cupaged" / "v1" / "model.proto").read_bytes()
    assert sorted(p.name for p in own.parent.iterdir()) == list(NAMES)


def test_export_to_where_a_file_is(cupaged: Inline, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text", encoding="utf-8")
    done = cupaged("proto", "export", str(tmp_path / "file"))
    assert done.code == 1 and done.out == ""
    assert done.err.endswith("admin.proto: Not a directory\n") and done.err.count("\n") == 1


def test_export_where_writing_fails(
    cupaged: Inline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *args: object, **settings: object) -> int:
        path.touch()
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    done = cupaged("proto", "export", str(tmp_path))
    path = tmp_path / "cupaged" / "v1" / "admin.proto"
    assert (done.code, done.out) == (1, "")
    assert done.err == f"cupaged: {path}: cannot be written: No space left on device\n"
    assert not list(path.parent.iterdir())


def test_a_descriptor_set_is_written_once(cupaged: Inline, tmp_path: Path) -> None:
    path = tmp_path / "a set.binpb"
    done = cupaged("proto", "descriptors", str(path))
    example = f"for example: grpcurl -protoset '{path}' list"
    assert (done.code, done.out, done.err) == (0, f"wrote {path}\n\n{example}\n", "")
    assert FileDescriptorSet.FromString(path.read_bytes()) == descriptor_set()
    again = cupaged("proto", "descriptors", str(path))
    assert (again.code, again.out.splitlines()[0]) == (0, f"unchanged {path}")
    path.write_bytes(b"mine")
    refused = cupaged("proto", "descriptors", str(path))
    assert refused.code == 1 and path.read_bytes() == b"mine"
    assert refused.err.endswith("differs; nothing was written; --force replaces it\n")
    assert cupaged("proto", "descriptors", str(path), "--force").out.startswith("replaced ")
    assert FileDescriptorSet.FromString(path.read_bytes()) == descriptor_set()


def test_a_descriptor_set_to_where_none_can_be(cupaged: Inline, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "set.binpb"
    done = cupaged("proto", "descriptors", str(path))
    assert (done.code, done.out) == (1, "")
    assert done.err == f"cupaged: {path}: cannot be written: No such file or directory\n"
    assert cupaged("proto", "descriptors", str(tmp_path)).err.endswith(": Is a directory\n")


def test_show_lists_every_rpc(cupaged: Inline) -> None:
    done = cupaged("proto", "show")
    assert done.code == 0 and max(map(len, done.out.splitlines())) <= 80
    services = [each for each in defined() if hasattr(each, "methods")]
    names = [service.full_name for service in services]
    assert names == [*OWN_SERVICES, "inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine"]
    for service in services:
        _, _, rest = done.out.partition(f"{service.file.name}: {service.full_name}\n")
        for rpc, line in zip(service.methods, rest.splitlines(), strict=False):
            taken = f"{'stream ' * rpc.client_streaming}{rpc.input_type.name}"
            given = f"{'stream ' * rpc.server_streaming}{rpc.output_type.name}"
            assert re.sub(" +", " ", line) == f" {rpc.name} {taken} -> {given}"


def test_everything_that_is_defined_can_be_shown(cupaged: Inline) -> None:
    texts = {name: text for file in all_files() for name, text in file.definitions().items()}
    assert set(texts) == {each.full_name for each in defined()}
    for name, text in texts.items():
        assert text.startswith("//") or not name.startswith("cupaged."), name
        assert text.count("{") == text.count("}"), name
        assert (
            sum(line.startswith(("message", "enum", "service")) for line in text.split("\n")) == 1
        )


def test_a_name_that_several_define(cupaged: Inline) -> None:
    own = "// Which requests to end.\nmessage AbortRequest {\n"
    assert cupaged("proto", "show", "AbortRequest").out.startswith(own)
    assert cupaged("proto", "show", "cupaged.v1.AbortRequest").out.startswith(own)
    other = "message AbortRequest {\n  repeated string request_ids = 1;\n}\n"
    assert cupaged("proto", "show", "vllm.grpc.engine.AbortRequest").out == other


def test_show_a_file_of_another_server(cupaged: Inline) -> None:
    text = (COMPATIBLE / "kserve.proto").read_text(encoding="utf-8")
    assert cupaged("proto", "show", "kserve").out == text


@pytest.mark.parametrize("name", ["TokenIds", "cupaged.v1.TokenIds"])
def test_show_a_message(cupaged: Inline, name: str) -> None:
    assert cupaged("proto", "show", name).out == (
        "// A list of token ids.\nmessage TokenIds {\n"
        "  // In [0, vocab_size).\n  repeated uint32 ids = 1;\n}\n"
    )


@pytest.mark.parametrize("name", ["admin", "admin.proto", "cupaged/v1/admin.proto"])
def test_show_a_file(cupaged: Inline, name: str) -> None:
    text = (PROTOS / "cupaged" / "v1" / "admin.proto").read_text(encoding="utf-8")
    assert cupaged("proto", "show", name).out == text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("proto",), "cupaged proto: a command is missing"),
        (("proto", "exprt", "d"), "unknown command 'exprt'; perhaps export"),
        (("proto", "descriptors"), "the following arguments are required: FILE"),
        (("proto", "export"), "the following arguments are required: DIR"),
        (("proto", "export", "d", "--froce"), "unknown option --froce; perhaps --force"),
        (("proto", "show", "SamplngOptions"), "perhaps SamplingOptions, got 'SamplngOptions'"),
        (("proto", "show", ""), "NAME must be a file or a name that the files define, got ''"),
    ],
)
def test_mistakes_are_one_line(cupaged: Inline, words: tuple[str, ...], told: str) -> None:
    done = cupaged(*words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert told in done.err
