"""The command line as a whole: verbs, options, what a mistake gets for an answer, exit codes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import MISSING, fields
from typing import Any

import pytest

from cupaged import __version__
from cupaged.cli import options
from cupaged.cli.main import build_parser
from cupaged.cli.parser import flags_of, known_spelling
from cupaged.engine_args import EngineArgs
from cupaged.sampling_params import _NOT_BUILT, SamplingParams
from tests.e2e.cli import SHORT, Inline, environment

VERBS = (
    "generate", "chat", "complete", "run-batch", "pull", "models", "estimate", "trace", "doctor",
    "completion",
)  # fmt: skip
WITH_MODEL = ("generate", "chat", "complete", "run-batch", "estimate")


def parsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def test_version(cupaged: Inline) -> None:
    done = cupaged("--version")
    assert (done.code, done.out) == (0, f"cupaged {__version__}\n")


def test_no_command_is_wrong_usage_and_shows_what_there_is(cupaged: Inline) -> None:
    done = cupaged()
    assert (done.code, done.out) == (2, "")
    assert all(f"\n    {verb} " in done.err for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_a_terminal_and_is_the_same_by_either_name(
    cupaged: Inline, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = cupaged(verb, "--help")
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 80
    assert cupaged("help", verb) == done


@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"pull"}))
def test_help_ends_with_an_example_that_parses(cupaged: Inline, verb: str) -> None:
    import shlex

    example = cupaged(verb, "--help").out.splitlines()[-1].strip()
    words = shlex.split(example.removeprefix('eval "$(').removesuffix(')"'))
    assert words[:2] == ["cupaged", verb]
    args, unknown = build_parser().parse_known_args(words[1:])
    assert not unknown and args.run is not None


def test_starting_is_cheap() -> None:
    code = "import sys, cupaged.cli.main as m; m.build_parser(); print(*sorted(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    heavy = {"numpy", "tokenizers", "safetensors", "huggingface_hub", "tqdm", "readline"}
    assert not set(run.stdout.split()) & heavy


def flag_names(groups: dict[str, tuple[options.Option, ...]]) -> dict[str, options.Option]:
    return {o.field or o.dest: o for group in groups.values() for o in group}


def test_every_engine_option_can_be_given() -> None:
    names = {field.name for field in fields(EngineArgs)}
    assert set(flag_names(options.ENGINE)) == names - {"model"}


def test_every_sampling_parameter_can_be_given() -> None:
    given = set(flag_names({**options.SAMPLING, **options.REPORT})) | {"n"}
    assert given == set(SamplingParams.field_names()) - set(_NOT_BUILT)


@pytest.mark.parametrize(
    ("groups", "defaults"),
    [
        (options.ENGINE, {f.name: f.default for f in fields(EngineArgs)}),
        (
            {**options.SAMPLING, **options.REPORT},
            {
                **{f.name: f.default for f in fields(SamplingParams)},
                **options.DEFAULTS,
            },
        ),
    ],
)
def test_the_defaults_in_the_help_are_the_real_ones(
    groups: dict[str, tuple[options.Option, ...]], defaults: dict[str, Any]
) -> None:
    for name, option in flag_names(groups).items():
        default = defaults[name]
        assert default is not MISSING
        _, stated, text = option.help.partition("(default: ")
        if isinstance(default, int | float | str) and not isinstance(default, bool):
            value = text.rstrip(")").partition(",")[0]
            assert value == (default if isinstance(default, str) else f"{default:g}"), name
        elif stated:  # a word for what None means
            assert default is None and not text[0].isdigit(), name


def test_other_spellings_mean_the_same() -> None:
    given = ["--max_new_tokens=3", "--temp", "0", "--", "--max_tokens"]
    assert known_spelling(given) == ["--max-tokens=3", "--temperature", "0", "--", "--max_tokens"]


def test_the_model_may_be_a_flag(cupaged: Inline, cli_model: str) -> None:
    by_place = cupaged("generate", cli_model, "-p", "the cat", *SHORT)
    assert by_place.code == 0 and by_place.err == ""
    for arguments in (("--model", cli_model), ("-m", cli_model, cli_model)):
        assert cupaged("generate", "-p", "the cat", *SHORT, *arguments) == by_place


@pytest.mark.parametrize("verb", WITH_MODEL)
def test_two_models_are_wrong_usage(cupaged: Inline, verb: str) -> None:
    done = cupaged(verb, "one", "--model", "two")
    assert done.code == 2
    assert done.err.startswith("cupaged: --model must be the same as MODEL='one'")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generat",), 2, "unknown command 'generat'; perhaps generate"),
        (("xyz",), 2, "unknown command 'xyz' (see"),
        (("help", "chats"), 2, "unknown command 'chats'; perhaps chat"),
        (("--modle", "x"), 2, "unknown option --modle; a command comes first"),
        (("chat", "--sytem", "x"), 2, "unknown option --sytem; perhaps --system"),
        (("chat", "--tempp", "1"), 2, "unknown option --tempp; perhaps --temperature"),
        (("chat", "--zzz"), 2, "unknown option --zzz (see cupaged chat --help)"),
        (("chat", "--max-tok", "3"), 2, "unknown option --max-tok; perhaps --max-tokens"),
        (("generate", "--tensor-parallel-size", "2"), 2, "is not supported in this version"),
        (("generate", "M", "hello"), 2, "unexpected argument 'hello'; a text is given with -p"),
        (("generate", "-p", "-x"), 2, "a value that begins with '-' is written --flag=VALUE"),
        (("generate", "-p", "\udcff"), 2, "argument -p/--prompt: must be UTF-8 text"),
        (("generate", "--logit-bias", "5"), 2, 'must be JSON such as {"17": -5'),
        (("generate", "--stop-token-ids", "a"), 2, "must be token ids such as 5,17,2, got 'a'"),
        (("generate", "--kv-cache-memory-bytes", "2G"), 2, "or like 512MiB or 2GiB, got '2G'"),
        (("completion", "tcsh"), 2, "invalid choice: 'tcsh'"),
        (("generate", "MODEL", "-p", "a", "--top-p", "1.5"), 2, "top_p must be a number in [0, 1]"),
        (("generate", "MODEL", "-p", "a", "--max-tokens", "0"), 2, "max_tokens must be an integer"),
        (("generate", "MODEL", "-p", "a", "--device", "tpu"), 2, "device must be 'auto' or one of"),
        (
            ("generate", "MODEL", "-p", "a", "--device", "cpu", "--dtype", "float16"),
            2,
            "dtype='float16' is not supported on cpu; use 'float32' or 'auto'",
        ),
        (("generate", "MODEL", "-p", "a", "--dtype", "int8"), 2, "dtype must be 'auto' or one of"),
        (("generate", "MODEL", "-p", "a", "--block-size", "12"), 2, "block_size must be one of"),
        (("generate", "MODEL", "-p", "a", "--threads", "0"), 2, "threads must be an integer >= 1"),
        (("generate", "MODEL", "-p", "a", "--scheduling-policy", "x"), 2, "scheduling_policy must"),
        (("generate", "MODEL", "-p", "a", "--logprobs", "1"), 2, "given together with --json"),
        (("generate", "./no/such/model", "-p", "a"), 1, "'./no/such/model': no such file or"),
        (("generate", "MODEL", "-p", "a b c " * 2000), 1, "prompt length in tokens must be at"),
        (("generate", "MODEL", "-p", ""), 1, "prompt must be a text of at least one token"),
    ],
)
def test_a_mistake_gets_one_line_and_an_exit_code(
    cupaged: Inline, cli_model: str, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = cupaged(*(cli_model if a == "MODEL" else a for a in arguments))
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1 and done.err.startswith("cupaged")


def test_sizes_and_engine_options_reach_the_engine(cupaged: Inline, cli_model: str) -> None:
    done = cupaged(
        "generate",
        cli_model,
        "-p",
        "a",
        "--kv-cache-memory-bytes",
        "64KiB",
        "--max-model-len",
        "64",
    )
    assert done.code == 1 and "in 0 MiB" in done.err  # one block is larger than that
    args = build_parser().parse_args(
        ["chat", "--kv-cache-memory-bytes", "1.5MiB", "--engine-seed", "7", "-t", "2", "-s", "9"]
    )
    given = options.engine_options(args)
    assert given == {"model": None, "kv_cache_memory_bytes": 3 << 19, "seed": 7, "threads": 2}
    assert options.given_sampling_options(args) == {"seed": 9}


def test_every_flag_is_spelt_with_dashes() -> None:
    for parser in parsers().values():
        assert not [flag for flag in flags_of(parser) if "_" in flag]
