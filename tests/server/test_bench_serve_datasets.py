"""Requests of a benchmark: made up, from texts, from traces, and files that are no such thing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.benchmarks.datasets import (
    DatasetError,
    DatasetOptions,
    ModelFacts,
    Sample,
    samples_of,
)
from cupaged.benchmarks.traces import TraceEntry, read_trace
from cupaged.errors import ConfigError, CupagedError

MODEL = ModelFacts("tiny", vocab_size=1000, max_model_len=2000, special_token_ids=(0, 7, 999))
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,48,10\r\n"
    "2023-11-16 18:17:04.2299600,4000,8\r\n"
    "2023-11-16 18:17:05.4799600,31,27"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1500, "input_length": 1100, "output_length": 3, "hash_ids": [0, 2, 3]}\n'
    '{"timestamp": 1500, "input_length": 512, "output_length": 9, "hash_ids": [2]}\n'
)


def words(texts: Any) -> list[int]:
    """A tokenizer: a token a word."""
    return [len(text.split()) for text in texts]


def samples(model: ModelFacts = MODEL, **options: Any) -> list[Sample]:
    return samples_of(DatasetOptions(**options), model, words)


def written(folder: Path, text: str | Any, name: str = "file") -> str:
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text), newline="")
    return str(path)


def test_random_prompts_have_the_lengths_asked_for() -> None:
    made = samples(num_prompts=20, random_input_len=30, random_output_len=9)
    assert len(made) == 20
    for sample in made:
        assert (len(sample.prompt), sample.prompt_tokens, sample.max_tokens) == (30, 30, 9)
        assert set(sample.prompt) <= set(range(1000)) - {0, 7, 999}
    assert len({sample.prompt[:4] for sample in made}) == 20


def test_random_lengths_are_uniform_in_their_range() -> None:
    made = samples(
        num_prompts=4000, random_input_len=20, random_output_len=10, random_range_ratio=0.5
    )
    given, wanted = Counter(s.prompt_tokens for s in made), Counter(s.max_tokens for s in made)
    assert set(given) == set(range(10, 31)) and set(wanted) == set(range(5, 16))
    # 4000 / 21 and 4000 / 11, five standard deviations each way.
    assert min(given.values()) > 122 and max(given.values()) < 259
    assert min(wanted.values()) > 273 and max(wanted.values()) < 455


def test_random_prompts_share_a_prefix_if_asked_for() -> None:
    first, second = samples(num_prompts=2, random_input_len=5, random_prefix_len=40)
    assert first.prompt_tokens == second.prompt_tokens == 45
    assert first.prompt[:40] == second.prompt[:40] and first.prompt[40:] != second.prompt[40:]


def test_equal_seeds_give_equal_requests() -> None:
    first, again, other = (samples(num_prompts=5, seed=s, random_input_len=8) for s in (1, 1, 2))
    assert first == again != other


def test_lengths_beyond_the_context_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2000 tokens together, the context of tiny"):
        samples(random_input_len=1990, random_output_len=11)
    assert samples(num_prompts=1, random_input_len=1990, random_output_len=10)


def conversation(*texts: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


def test_sharegpt_takes_first_messages_with_the_lengths_of_their_answers(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        [
            conversation("a b c d e", "1 2 3 4 5 6", "ignored"),
            conversation("too short", "1 2 3 4"),
            conversation("a b c d", "too short"),
            conversation("w " * 1025, "1 2 3 4"),
            conversation("w " * 1000, "w " * 1001),
            conversation("alone"),
            {"id": "no conversation"},
            conversation("p q r s", "1 2 3 4"),
        ],
    )
    options: dict[str, Any] = {"name": "sharegpt", "path": path}
    made = samples(**options, disable_shuffle=True)
    assert [(s.prompt, s.prompt_tokens, s.max_tokens) for s in made] == [
        ("a b c d e", 5, 6), ("p q r s", 4, 4),
    ]  # fmt: skip
    assert {s.prompt for s in samples(**options)} == {"a b c d e", "p q r s"}
    fixed = samples(**options, sharegpt_output_len=2, disable_shuffle=True)
    assert [s.max_tokens for s in fixed] == [2, 2, 2, 2]
    assert len(samples(**options, num_prompts=1)) == 1


def test_custom_prompts_are_chats_where_the_model_knows_chats(tmp_path: Path) -> None:
    text = '{"prompt": "one"}\n\n{"prompt": "two", "output_tokens": 40}\n'
    path = written(tmp_path, text, "file.jsonl")
    options: dict[str, Any] = {"name": "custom", "path": path, "disable_shuffle": True}
    assert samples(**options) == [Sample("one", 256), Sample("two", 40)]
    assert [s.max_tokens for s in samples(**options, custom_output_len=7)] == [7, 7]
    chat = ModelFacts("chat", 1000, 2000, has_chat_template=True)
    assert [s.is_chat for s in samples(chat, **options)] == [True, True]
    assert not samples(chat, **options, skip_chat_template=True)[0].is_chat


def test_texts_are_shuffled_by_the_seed(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(f'{{"prompt": "{i}"}}\n' for i in range(30)))

    def order(seed: int) -> list[Any]:
        return [s.prompt for s in samples(name="custom", path=path, seed=seed)]

    assert order(1) == order(1) != order(2)
    assert sorted(map(int, order(1))) == list(range(30))


def test_azure_traces(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE)
    made = samples(name="trace", path=path)
    assert [(s.prompt_tokens, s.max_tokens) for s in made] == [(48, 10), (31, 27)]
    assert [s.time_s for s in made] == pytest.approx([0.0, 1.5], abs=1e-6)
    assert [len(s.prompt) for s in made] == [48, 31]
    assert len(samples(name="trace", path=path, num_prompts=1)) == 1


def test_lengths_without_times(tmp_path: Path) -> None:
    path = written(tmp_path, "input_tokens,output_tokens\n9,46\n0,5\n5,0\n3,4\n")
    made = samples(name="trace", path=path)
    assert [(s.prompt_tokens, s.max_tokens, s.time_s) for s in made] == [
        (9, 46, None),
        (3, 4, None),
    ]


def test_lengths_with_times_are_put_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, "time_s,input_tokens,output_tokens\n8.5,1,2\n6,3,4\n7,5,6\n")
    made = samples(name="trace", path=path)
    assert [(s.time_s, s.prompt_tokens) for s in made] == [(0.0, 3), (1.0, 5), (2.5, 1)]


def test_mooncake_traces_share_the_blocks_of_equal_ids(tmp_path: Path) -> None:
    first, second, third = samples(name="trace", path=written(tmp_path, MOONCAKE))
    assert [s.time_s for s in (first, second, third)] == [0.0, 1.5, 1.5]
    assert [len(s.prompt) for s in (first, second, third)] == [600, 1100, 512]
    assert (
        first.prompt[:512] == second.prompt[:512] and first.prompt[512:] != second.prompt[512:600]
    )
    assert second.prompt[512:1024] == third.prompt


def test_one_line_of_json_is_a_trace_too(tmp_path: Path) -> None:
    path = written(tmp_path, '{"input_length": 3, "output_length": 4}')
    assert read_trace(path) == [TraceEntry(3, 4)]


def test_workloads_have_the_prompts_that_the_offline_benchmark_gives_them(tmp_path: Path) -> None:
    requests = [
        {"id": 0, "prompt_tokens": 33, "max_tokens": 5, "arrival_unit": 0.0},
        {"id": 1, "prompt_tokens": 8, "max_tokens": 4, "arrival_unit": 0.25},
    ]
    path = written(tmp_path, {"name": "w", "requests": requests})
    large = ModelFacts("large", vocab_size=49152, max_model_len=2048)
    made = samples(large, name="trace", path=path)
    for i, sample in enumerate(made):
        size = requests[i]["prompt_tokens"]
        ids = np.random.default_rng(i).integers(1000, 49000, int(size))
        assert list(sample.prompt) == ids.tolist()
    assert [(s.time_s, s.max_tokens) for s in made] == [(0.0, 5), (0.25, 4)]
    small = samples(name="trace", path=path)
    assert all(isinstance(i, int) and i < 1000 for s in small for i in s.prompt)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its first line must name the columns"),
        ("a,b\n1,2\n", "its first line must name the columns"),
        ("input_tokens,output_tokens\n", "holds no request"),
        ("input_tokens,output_tokens\n5,x\n", "line 2: output_tokens must be a number of tokens"),
        ("input_tokens,output_tokens\n5,4\n\n5\n", "line 4: output_tokens must be a number"),
        ("input_tokens,output_tokens\n5,-4\n", "line 2: output_tokens must be .* got '-4'"),
        ("input_tokens,output_tokens\n9999,1\n", "none of its 1 requests fits"),
        (AZURE.replace("11-16 18:17:04", "13-16 18:17:04"), "line 3: TIMESTAMP must be a date"),
        (AZURE.replace("2023-11-16 18:17:04.2299600", "noon"), "TIMESTAMP must be .* got 'noon'"),
        ('{"input_length": 5}\n', "line 1: output_length must be a number of tokens, got None"),
        ('{"input_length": 5, "output_length": 1}\n{"input', "line 2: no valid JSON"),
        ('{"input_length": 5, "output_length": true}\n', "line 1: output_length must be"),
        (
            '{"input_length": 600, "output_length": 1, "hash_ids": [1]}\n',
            "600 tokens are 2 blocks of 512, got 1 hash_ids",
        ),
        ('{"input_length": 6, "output_length": 1, "hash_ids": ["x"]}\n', "hash_ids must be a list"),
        ('{"input_length": 6, "output_length": 1, "timestamp": -1}\n', "timestamp must be a date"),
        (
            '{"input_length": 6, "output_length": 1, "timestamp": 5}\n'
            '{"input_length": 6, "output_length": 1}\n',
            "some of its requests have a time and some have none",
        ),
        ('{"requests": [{"prompt_tokens": 5}]}', r"requests\[0\]: max_tokens must be"),
        ('{"requests": [5]}', r"requests\[0\] must be an object, got 5"),
        ('{"requests": []}', "holds no request"),
    ],
)
def test_a_damaged_trace_is_refused_where_it_is_damaged(
    tmp_path: Path, text: str, message: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DatasetError, match=message) as refused:
        samples(name="trace", path=path)
    assert str(refused.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sharegpt", "[}", "line 1: no valid JSON"),
        ("sharegpt", "{}", "must be a list of conversations"),
        ("sharegpt", "[1, {}]", "nothing in it fits; .* at most 2000 tokens"),
        ("custom", "", "nothing in it fits"),
        ("custom", "5\n", "line 1: must be an object, got 5"),
        ("custom", '{"prompt": "x"}\n{"text": "y"}\n', "line 2: must have a text as its prompt"),
        ("custom", '{"prompt": ""}\n', "line 1: must have a text as its prompt"),
        ("custom", '{"prompt": "a\\ud800"}\n', "line 1: must have a text as its prompt"),
        ("custom", '{"prompt": [1]}\n', "line 1: must have a text as its prompt"),
        (
            "sharegpt",
            '[{"conversations": [{"value": "a b c d\\ud800"}, {"value": "a b c d"}]}]',
            "nothing in it fits",
        ),
        ("custom", '{"prompt": "x", "output_tokens": 0}', "output_tokens must be >= 1, got 0"),
        ("custom", '{"prompt": "x", "output_tokens": 2000}', "nothing in it fits"),
    ],
)
def test_a_damaged_file_of_texts_is_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        samples(name=name, path=written(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="nowhere: cannot be read: No such file"):
        samples(name="custom", path=str(tmp_path / "nowhere"))
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(DatasetError, match="is not UTF-8 at byte 2"):
        samples(name="trace", path=str(tmp_path / "bytes"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "sonnet"}, "--dataset-name must be one of random, sharegpt, custom, trace, got"),
        ({"name": "trace"}, "--dataset-path must be a file for trace"),
        ({"path": "x"}, "--dataset-path must be left out for random"),
        ({"num_prompts": 0}, "--num-prompts must be in"),
        ({"seed": -1}, "--seed must be in"),
        ({"random_output_len": 0}, "--random-output-len must be in"),
        ({"random_input_len": -1}, "--random-input-len must be in"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio must be in"),
        ({"custom_output_len": 5}, "--custom-output-len must be given with --dataset-name custom"),
        (
            {"name": "trace", "path": "x", "random_input_len": 5},
            "--random-input-len must be given with --dataset-name random",
        ),
        ({"skip_chat_template": True}, "--skip-chat-template must be given with"),
        ({"disable_shuffle": True}, "--disable-shuffle must be given with"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CupagedError, match=message):
        DatasetOptions(**options)
