"""`cupaged proto`: what it writes, shows and refuses."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cupaged.cli import proto
from cupaged.v1 import admin_pb2, generation_pb2, model_pb2
from tests.e2e.cli import Inline
from tests.server.make_protos import PROTOS

NAMES = ("admin.proto", "generation.proto", "model.proto")
MODULES = (admin_pb2, generation_pb2, model_pb2)


@pytest.fixture
def cupaged(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Inline:
    """The command, in this process."""
    return Inline(monkeypatch, capfdbinary)


def defined() -> set[str]:
    """Services, messages and enums of the stubs."""
    kinds = ("services_by_name", "message_types_by_name", "enum_types_by_name")
    return {
        name for module in MODULES for kind in kinds for name in getattr(module.DESCRIPTOR, kind)
    }


def test_export_writes_what_a_compiler_takes(cupaged: Inline, tmp_path: Path) -> None:
    folder = tmp_path / "for others"
    done = cupaged("proto", "export", str(folder))
    paths = [folder / "cupaged" / "v1" / name for name in NAMES]
    assert (done.code, done.err) == (0, "")
    *wrote, empty, example = done.out.splitlines()
    assert wrote == [f"wrote {path}" for path in paths] and not empty
    for path in paths:
        assert path.read_bytes() == (PROTOS / "cupaged" / "v1" / path.name).read_bytes()
    assert sorted(p for p in folder.rglob("*") if p.is_file()) == paths
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
    assert done.code == 0 and done.out.count("unchanged ") == 3 and "wrote" not in done.out
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
    assert done.code == 0 and f"replaced {own}\n" in done.out and done.out.count("wrote ") == 2
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

    monkeypatch.setattr(Path, "write_text", full)
    done = cupaged("proto", "export", str(tmp_path))
    path = tmp_path / "cupaged" / "v1" / "admin.proto"
    assert (done.code, done.out) == (1, "")
    assert done.err == f"cupaged: {path}: cannot be written: No space left on device\n"
    assert not list(path.parent.iterdir())


def test_show_lists_every_rpc(cupaged: Inline) -> None:
    done = cupaged("proto", "show")
    assert done.code == 0 and max(map(len, done.out.splitlines())) <= 80
    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            assert f"{module.DESCRIPTOR.name}: {service.name}\n" in done.out
            for rpc in service.methods:
                stream = "stream " if rpc.server_streaming else ""
                told = f"{rpc.input_type.name} -> {stream}{rpc.output_type.name}\n"
                assert told in done.out and f"  {rpc.name} " in done.out


def test_everything_that_is_defined_can_be_shown(cupaged: Inline) -> None:
    assert set(proto.definitions()) == defined()
    for name, text in proto.definitions().items():
        assert text.startswith("//") and text.count("{") == text.count("}"), name
        assert (
            sum(line.startswith(("message", "enum", "service")) for line in text.split("\n")) == 1
        )


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
