"""The stubs at work: made again they are the same, and they load on both majors of protobuf."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.environments import environment
from tests.server import make_protos
from tests.server.make_protos import DESCRIPTOR_SET, REQUIREMENTS, ROOT, compatible_sets

# A server and a client in one process, on nothing but what the stubs need.
ROUND_TRIP = """
import sys
from concurrent.futures import ThreadPoolExecutor
import google.protobuf, grpc, grpc_health.v1.health, grpc_reflection.v1alpha.reflection, grpc_status
from cupaged.v1 import admin_pb2_grpc, generation_pb2 as pb, generation_pb2_grpc, model_pb2_grpc

class Service(generation_pb2_grpc.GenerationServiceServicer):
    def GenerateStream(self, request, context):
        yield pb.GenerateStreamResponse(started=pb.Started(request_id=request.request_id))
        for token in request.token_ids.ids:
            yield pb.GenerateStreamResponse(delta=pb.Delta(token_ids=[token]))
        end = pb.Finished(reason=pb.FINISH_REASON_STOP, match=pb.StopMatch(stop_string="end"))
        yield pb.GenerateStreamResponse(finished=end, usage=pb.Usage(completion_tokens=2))

server = grpc.server(ThreadPoolExecutor(1))
generation_pb2_grpc.add_GenerationServiceServicer_to_server(Service(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    request = pb.GenerateStreamRequest(request_id="r", token_ids=pb.TokenIds(ids=[7, 9]))
    got = list(stub.GenerateStream(request, timeout=30))
server.stop(None).wait()
assert [m.WhichOneof("event") for m in got] == ["started", "delta", "delta", "finished"]
assert [list(m.delta.token_ids) for m in got[1:3]] == [[7], [9]]
assert got[3].finished.match.stop_string == "end" and got[3].usage.completion_tokens == 2
assert not {"numpy", "tokenizers"} & set(sys.modules)
print(google.protobuf.__version__, grpc.__version__)
"""


def requirements() -> list[str]:
    """What cupaged asks for of gRPC and protobuf."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [r for r in project["dependencies"] if r.startswith(("grpcio", "protobuf"))]
    assert len(found) == 5
    return found


@pytest.mark.slow
def test_generating_again_changes_nothing(tmp_path: Path) -> None:
    python = environment(tmp_path / "environment", *REQUIREMENTS)
    out = tmp_path / "out"
    make_protos.make(out, str(python))
    made = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    here = {p.relative_to(ROOT).as_posix() for p in (ROOT / "cupaged" / "v1").glob("*_pb2*.py*")}
    assert set(made) == {*here, DESCRIPTOR_SET, *compatible_sets()} and len(here) == 12
    assert not [name for name, data in made.items() if (ROOT / name).read_bytes() != data]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lowest", "version"), [(True, "6.33.5"), (False, "7.")], ids=["lowest", "newest"]
)
def test_stubs_load_on_the_oldest_and_the_newest_protobuf(
    tmp_path: Path, lowest: bool, version: str
) -> None:
    wanted = requirements()
    if lowest:
        wanted = [f"{r.partition('>=')[0]}=={r.partition('>=')[2].split(',')[0]}" for r in wanted]
    python = environment(tmp_path / "environment", *wanted)
    assert round_trip(str(python)).startswith(version)


def test_stubs_work_here() -> None:
    assert round_trip(sys.executable)


def round_trip(python: str) -> str:
    """Versions of protobuf and grpcio, after a request and its stream; a warning is an error."""
    done = subprocess.run(
        [python, "-W", "error", "-c", ROUND_TRIP],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
