"""Traces as bytes: what is written is read, in few bytes, and damage is told, wherever it is."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import msgpack
import numpy as np
import pytest

from cupaged.engine.step_events import AddEvent, Event, StepEvents, first_difference
from cupaged.engine.trace_codec import pack, pack_mostly, unpack, unpack_mostly
from cupaged.engine.trace_file import TraceReader, check_trace_path
from cupaged.errors import ConfigError, CupagedError, TraceError
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests.unit.small_core import drain, request
from tests.unit.traced import Kept, read_all, traced_core, writer_of

FIRST_LINE = b"cupaged trace 1\n"
LIMITS: dict[str, Any] = {"num_blocks": 7, "max_steps_in_flight": 2}


class Both(Kept):
    """Keeps events and writes them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.writer = writer_of(path, **LIMITS)

    def write(self, event: Event) -> None:
        """Do both."""
        super().write(event)
        self.writer.write(event)


def busy_trace(path: Path, num_requests: int = 6) -> Both:
    """Several requests in a tiny pool: samples, preemptions, cached prefixes, an abort."""
    both = Both(path)
    core = traced_core(both, **LIMITS)
    for i in range(num_requests):
        core.add_request(request(f"r{i}", 3 + i, n=1 + i % 2, max_tokens=3 + i, seed=i))
        core.step()
    core.abort(f"r{num_requests - 2}")
    core.reset_prefix_cache()
    drain(core)
    return both


@pytest.mark.parametrize(
    ("values", "num_bytes"),
    [([], 0), ([0, 255], 3), ([-1, 127], 3), ([65535], 3), ([-1, 300], 5), ([70000], 5)],
)
def test_arrays_take_the_narrowest_type(values: list[int], num_bytes: int) -> None:
    form = pack(np.array(values, np.int32))
    assert (len(form), unpack(form).tolist()) == (num_bytes, values)


def test_what_is_as_usual_costs_nothing() -> None:
    usual = np.ones(1000, np.int32)
    assert pack_mostly(usual, 1) is None
    usual[[3, 900]] = 17
    form = pack_mostly(usual, 1)
    assert form is not None and sum(map(len, form if isinstance(form, list) else [form])) == 8
    assert (unpack_mostly(form, 1, 1000) == usual).all()
    other = np.arange(1000, dtype=np.int32)
    assert (unpack_mostly(pack_mostly(other, 1), 1, 1000) == other).all()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    both = busy_trace(tmp_path / "t")
    events = read_all(tmp_path / "t")
    assert len(events) == len(both.events) > 20
    for written, read in zip(both.events, events, strict=True):
        assert first_difference(written, read) is None
    steps = [e for e in both.events if isinstance(e, StepEvents)]
    assert any(plan.preempted for step in steps for plan in step.plans)
    assert any(plan.copies for step in steps for plan in step.plans)
    times = [(e.time_us, e.total_us) for e in events if isinstance(e, StepEvents)]
    assert times == [(e.time_us, e.total_us) for e in steps]


def test_every_field_of_a_request_is_kept(tmp_path: Path) -> None:
    params = SamplingParams(
        n=2, temperature=0.5, stop=["end", "\udcff"], stop_token_ids=[3], logit_bias={4: -1.5},
        bad_words=["x"], prompt_logprobs=1, max_tokens=None, min_tokens=2,
    )  # fmt: skip
    full = CoreRequest(
        "ä\udc80", (1, 49, 0), params, (5, 6), 2**64 - 1, -4, ((1, 2), (3,)), False, "s"
    )
    writer = writer_of(tmp_path / "t")
    writer.write(AddEvent(7, full))
    writer.write(AddEvent(8, request("plain", 3)))
    first, second = read_all(tmp_path / "t")
    assert first == AddEvent(7, full)
    assert second == AddEvent(8, request("plain", 3))


def test_a_decoding_step_of_many_sequences_costs_two_bytes_each(tmp_path: Path) -> None:
    many: dict[str, Any] = {"max_num_seqs": 200, "num_blocks": 4000, "max_num_batched_tokens": 8192}
    limits: dict[str, Any] = {**many, "vocab_size": 50_000, "max_model_len": 4000}
    core = traced_core(writer_of(tmp_path / "t", **limits), **limits)
    for i in range(200):
        core.add_request(request(f"r{i}", 5, max_tokens=100, ignore_eos=True, seed=i))
    core.step()
    core.step()
    before = os.path.getsize(tmp_path / "t")
    core.step()
    assert os.path.getsize(tmp_path / "t") - before < 200 * 2 + 120


def test_the_file_is_for_its_owner_and_an_older_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("something else")
    path.chmod(0o644)
    busy_trace(path)
    assert (tmp_path / "t.old").read_text() == "something else"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = path.read_bytes()
    writer_of(path)
    assert (tmp_path / "t.old").read_bytes() == first


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path, why in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "t", "there is no folder"),
        (tmp_path / "\0", "it is no name"),
        ("", "it is no name"),
    ):
        with pytest.raises(ConfigError, match=f"trace must be a file that can be written.*{why}"):
            check_trace_path(path)
    with pytest.raises(ConfigError, match="No space left on device"):
        writer_of(Path("/dev/full"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="No such device"):
        writer_of(tmp_path / "pipe")


def test_a_full_disk_ends_the_trace_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = traced_core(writer_of(tmp_path / "t"))
    core.add_request(request("a", 5, max_tokens=8))
    core.step()
    num_bytes = os.path.getsize(tmp_path / "t")
    write, room = os.write, [10]

    def writes_ten_bytes(file: int, data: bytes) -> int:
        number, room[0] = min(room[0], len(data)), 0
        if not number:
            raise OSError(28, "No space left on device")
        return write(file, data[:number])

    monkeypatch.setattr(os, "write", writes_ten_bytes)
    with caplog.at_level(logging.ERROR):
        assert len(drain(core)) == 7
    assert [r.message for r in caplog.records] == [
        f"the trace {tmp_path / 't'} ends here: No space left on device"
    ]
    assert os.path.getsize(tmp_path / "t") == num_bytes, "what was written in part stays"
    assert len(read_all(tmp_path / "t")) == 2


def test_a_trace_can_be_cut_anywhere(tmp_path: Path) -> None:
    whole = busy_trace(tmp_path / "t", 3).events
    data = (tmp_path / "t").read_bytes()
    ends = ends_of(data)
    assert len(ends) == len(whole) + 1
    for length in range(len(data) + 1):
        (tmp_path / "cut").write_bytes(data[:length])
        if length < ends[0]:
            with pytest.raises(TraceError, match=r"is no.*trace|version|before its first record"):
                TraceReader(tmp_path / "cut")
            continue
        with TraceReader(tmp_path / "cut") as trace:
            num_whole = sum(end <= length for end in ends)
            assert sum(1 for _ in trace) == num_whole - 1
            assert trace.num_cut_bytes == length - ends[num_whole - 1]


def test_a_header_that_asks_for_all_memory_is_refused(tmp_path: Path) -> None:
    busy_trace(tmp_path / "t", 3)
    header, *_ = frames_of((tmp_path / "t").read_bytes())
    assert isinstance(header, dict)
    header["config"] |= {"num_blocks": 2**30, "max_num_seqs": 2**30, "max_model_len": 2**30}
    (tmp_path / "bad").write_bytes(FIRST_LINE + framed(header))
    with pytest.raises(TraceError, match="its block table is too large"):
        TraceReader(tmp_path / "bad")


def ends_of(data: bytes) -> list[int]:
    """Where each record of a trace ends, that of the header first."""
    ends = [len(FIRST_LINE)]
    while ends[-1] < len(data):
        length = int.from_bytes(data[ends[-1] : ends[-1] + 4], "little")
        ends.append(ends[-1] + 12 + length)
    return ends[1:]


def test_a_trace_that_is_damaged_anywhere_is_refused(tmp_path: Path) -> None:
    busy_trace(tmp_path / "t", 3)
    data, random = (tmp_path / "t").read_bytes(), Random(0)
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << random.randrange(8)
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(TraceError), TraceReader(tmp_path / "bad") as trace:
            list(trace)


def test_records_that_say_nonsense_are_refused(tmp_path: Path) -> None:
    """With right checksums: made by hand, or by another program."""
    busy_trace(tmp_path / "t")
    frames, random = frames_of((tmp_path / "t").read_bytes()), Random(1)
    num_refused = 0
    for _ in range(600):
        number = random.randrange(1, len(frames))
        changed = [*frames]
        changed[number] = replaced(frames[number], random)
        (tmp_path / "bad").write_bytes(FIRST_LINE + b"".join(map(framed, changed)))
        try:
            with TraceReader(tmp_path / "bad") as trace:
                list(trace)
        except CupagedError:
            num_refused += 1
    assert num_refused > 300


def frames_of(data: bytes) -> list[object]:
    """The bodies of all records, the header first."""
    ends = ends_of(data)
    starts = [len(FIRST_LINE), *ends[:-1]]
    return [
        msgpack.unpackb(data[a + 12 : b], strict_map_key=False, unicode_errors="surrogatepass")
        for a, b in zip(starts, ends, strict=True)
    ]


def framed(form: object) -> bytes:
    """A record with right checksums."""
    body: bytes = msgpack.packb(form, unicode_errors="surrogatepass")
    length = len(body).to_bytes(4, "little")
    return length + b"".join(crc32(x).to_bytes(4, "little") for x in (length, body)) + body


def replaced(form: object, random: Random) -> object:
    """The same with one value in it, at any depth, of another kind."""
    if isinstance(form, list) and form and random.random() < 0.9:
        i = random.randrange(len(form))
        return [replaced(value, random) if j == i else value for j, value in enumerate(form)]
    return random.choice(
        [None, -1, 2**40, 2**63, "x", b"\x07", b"\x00", b"\x04abc", [], {}, 0.5, [[1]]]
    )


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "is not a trace of cupaged"),
        (b"\x00" * 500, "is not a trace of cupaged"),
        (b"GGUF" * 100, "is not a trace of cupaged"),
        (b"cupaged trace 2\nwhatever", "is a trace of version '2'; this cupaged reads 1"),
        (b"cupaged trace 1\n", "ends before its first record"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, data: bytes, error: str) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(TraceError, match=error):
        TraceReader(tmp_path / "t")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path, tmp_path / "\0"):
        with pytest.raises(TraceError, match="cannot be read"):
            TraceReader(path)
