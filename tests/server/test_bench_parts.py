"""What the backends of `cupaged bench serve` that speak in texts are made of."""

from __future__ import annotations

import pytest

from cupaged.benchmarks import server_sent_events
from cupaged.benchmarks.backend import NO_LIMIT
from cupaged.benchmarks.datasets import DatasetOptions, ModelFacts, Sample, samples_of
from cupaged.benchmarks.load import RequestRecord
from cupaged.benchmarks.server_sent_events import EventReader
from cupaged.benchmarks.text_prompts import TextPrompts
from cupaged.benchmarks.token_counts import settle, spread
from tests.tiny_models import SPECIAL_TOKENS


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data:a\r\n\r\ndata:  b\r\n\r\n", [b"a", b" b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"\xef\xbb\xbfdata: a\n\n\n\n", [b"a"]),
        (b": nothing\nevent: x\nid: 1\ndata: a\ndata\ndata: b\n\n", [b"a\n\nb"]),
        (b"database: a\n\ndata : b\n\n", []),
        (b"data: a\n\ndata: b\n", [b"a"]),
    ],
)
def test_events_however_they_are_cut(data: bytes, events: list[bytes]) -> None:
    for size in range(1, len(data) + 1):
        reader = EventReader()
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        assert [event for piece in pieces for event in reader.feed(piece)] == events, size


def test_an_event_without_end_is_refused() -> None:
    reader = EventReader()
    with pytest.raises(ValueError, match="more than 16 MiB"):
        for _ in range(17):
            list(reader.feed(b"data: " + b"x" * 2**20 + b"\n"))


def test_lines_without_a_value_are_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_sent_events, "_MAX_EVENT_BYTES", 100)  # joined by LF
    reader = EventReader()
    assert list(reader.feed(b"data:\n" * 100)) == []
    with pytest.raises(ValueError, match="more than"):
        list(reader.feed(b"data:\n"))


@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [
        (6, [1, 1, 1], [2, 2, 2]),
        (9, [1, 2, 1], [2, 5, 2]),
        (3, [1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0]),
        (7, [0, 0], [4, 3]),
        (0, [3, 4], [0, 0]),
        (5, [], []),
    ],
)
def test_tokens_are_spread(total: int, shares: list[int], expected: list[int]) -> None:
    assert spread(total, shares) == expected


def told(*texts: str, usage: tuple[int, int] | None = None) -> RequestRecord:
    """A record of an answer in texts; with the server's counts where they are given."""
    times = [0.1 * i for i in range(len(texts))]
    prompt, answer = usage or (0, 0)
    return RequestRecord(
        0.0, message_times_s=times, message_texts=[*texts], has_usage=usage is not None,
        prompt_tokens=prompt, output_tokens=answer,
    )  # fmt: skip


def words(texts: object) -> list[int]:
    assert isinstance(texts, list)
    return [len(text.split()) for text in texts]


def test_who_counts() -> None:
    sample = Sample("of three words", 9)
    counted = told("a b c", " d", usage=(7, 8))
    assert settle([counted], [sample], words) == "server"
    assert (counted.prompt_tokens, counted.output_tokens) == (7, 8)
    assert counted.message_tokens == [6, 2]
    for count, by, expected in ((words, "tokenizer", (3, 4)), (None, "messages", (0, 2))):
        record = told("a b c", " d")
        assert settle([counted, record], [sample, sample], count) == by
        assert (record.prompt_tokens, record.output_tokens) == expected
        assert sum(record.message_tokens) == expected[1]
    known = told("a")
    settle([known], [Sample("x", 9, prompt_tokens=5)], None)
    assert known.prompt_tokens == 5


def test_what_failed_or_was_counted_by_message_is_left_alone() -> None:
    failed = told("a")
    failed.error_code = "x"
    whole = RequestRecord(0.0, message_tokens=[2, 3], output_tokens=5, has_usage=True)
    assert settle([failed, whole], [Sample("x", 9)] * 2, words) == "server"
    assert (failed.output_tokens, failed.message_tokens) == (0, [])
    assert (whole.output_tokens, whole.message_tokens) == (5, [2, 3])


@pytest.mark.parametrize("length", [1, 5, 64])
def test_made_up_prompts_are_texts_of_their_length(tiny_model: str, length: int) -> None:
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(f"{tiny_model}/tokenizer.json")
    texts = TextPrompts.load(tiny_model)
    model = texts.describe(ModelFacts("x", vocab_size=0, max_model_len=NO_LIMIT))
    assert model.vocab_size == known.get_vocab_size()
    # What is no whole character is kept out, too: among others all bytes that are not ASCII.
    alone = [known.decode([i]) for i in range(model.vocab_size)]
    no_text = [i for i, text in enumerate(alone) if not text or "\ufffd" in text]
    assert model.special_token_ids == tuple(no_text)
    assert no_text[:3] == [0, 1, 2] and len(no_text) >= len(SPECIAL_TOKENS) + 128
    options = DatasetOptions(num_prompts=50, random_input_len=length)
    traced = [Sample(tuple(range(i, i + length)), 3) for i in range(50)]  # any id comes there
    exact = 0
    for sample in (*samples_of(options, model, texts.count), *traced):
        made = texts.as_text(sample)
        assert isinstance(made.prompt, str) and made.max_tokens == sample.max_tokens
        number = len(known.encode(made.prompt, add_special_tokens=False).ids)
        assert made.prompt_tokens == number and 0 < number <= length
        exact += number == length
    assert exact == 100
    text = Sample("as it is", 3)
    assert texts.as_text(text) is text
