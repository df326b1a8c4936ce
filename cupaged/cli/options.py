"""Options that several verbs share, and what they mean to the engine.

One table a group; a row is a flag, its help, and how its value is read. The defaults that the help
states are those of `EngineArgs` and of `sampling_params`; a test compares them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cupaged import json_values
from cupaged.cli.parser import utf8_text
from cupaged.cli.streams import read_text
from cupaged.errors import ConfigError

if TYPE_CHECKING:
    from cupaged.sampling_params import BeamSearchParams, SamplingParams

MODEL_HELP = (
    "a folder with config.json and safetensors, a .gguf file, or a name on the hub "
    "(default: SmolLM2-135M-Instruct)"
)


class Option(NamedTuple):
    """A flag, what it does, how its value is read; `field` where that is not the flag's name."""

    flags: str
    help: str
    settings: dict[str, Any]
    field: str = ""

    @property
    def dest(self) -> str:
        """Where argparse keeps the value."""
        return self.flags.split()[-1].removeprefix("--").replace("-", "_")


def size_in_bytes(text: str) -> int:
    """`1000`, `512MiB`, `2GiB`, `1.5GB`."""
    try:
        return json_values.size_in_bytes(text)
    except ValueError:
        allowed = "bytes, or like 512MiB or 2GiB"
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}") from None


def token_ids(text: str) -> list[int]:
    """`5` or `5,17,2`."""
    if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"must be token ids such as 5,17,2, got {text!r}")
    return [int(part) for part in text.split(",")]


def logit_bias(text: str) -> dict[int, float]:
    """`{"17": -5, "42": 2.5}`."""
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise argparse.ArgumentTypeError(
            f'must be JSON such as {{"17": -5, "42": 2.5}}, got {text!r:.80}'
        ) from None


def early_stopping(text: str) -> bool | str:
    """`true`, `false` or `never`."""
    values: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in values:
        raise argparse.ArgumentTypeError(f"must be true, false or never, got {text!r:.80}")
    return values[text]


_INT: dict[str, Any] = {"type": int, "metavar": "N"}
_FLOAT: dict[str, Any] = {"type": float, "metavar": "X"}
_LIKELIEST: dict[str, Any] = {"type": int, "metavar": "K"}
_NAME: dict[str, Any] = {"metavar": "NAME"}
_IDS: dict[str, Any] = {"type": token_ids, "metavar": "IDS", "action": "extend"}
_TEXTS: dict[str, Any] = {"type": utf8_text, "metavar": "TEXT", "action": "append"}
_ON: dict[str, Any] = {"action": "store_const", "const": True}
_OFF: dict[str, Any] = {"action": "store_const", "const": False}

ENGINE = {
    "model and device": (
        Option("--tokenizer", "folder whose tokenizer replaces the model's", {"metavar": "PATH"}),
        Option(
            "--device",
            "cuda, cpu, emulated (a GPU's kernels under checks, slow), or auto: cuda where there "
            "is a GPU, else cpu (default: auto)",
            _NAME,
        ),
        Option(
            "--dtype",
            "float32, float16, bfloat16, or auto: float32 on cpu, else the model's own type of 16 "
            "bits (default: auto)",
            _NAME,
        ),
        Option("--max-model-len", "tokens of a sequence (default: the model's own limit)", _INT),
        Option(
            "--generation-config",
            "auto: the model's generation_config.json gives defaults of sampling; vllm: it does "
            "not (default: auto)",
            _NAME,
        ),
        Option("-t --threads", "that compute on cpu (default: the cores that may be used)", _INT),
        Option(
            "--cpu-kernels",
            "what computes on cpu: native, kernels built with cupaged; numpy; or auto: native "
            "where they were built (default: auto)",
            _NAME,
        ),
        Option(
            "--cpu-weight-dtype",
            "how the native kernels keep weights: float32; bfloat16 or q8, rounded; file, as "
            "stored, if that is BF16, Q8_0, Q4_0 or Q4_1; or auto: so where it is one of these, "
            "else float32 (default: auto)",
            _NAME,
        ),
    ),
    "KV memory": (
        Option("--block-size", "tokens of a block: 8, 16, 32, 64 or 128 (default: 16)", _INT),
        Option(
            "--gpu-memory-utilization",
            "share of a GPU's memory that may be taken (default: 0.92)",
            _FLOAT,
        ),
        Option(
            "--kv-cache-memory-bytes",
            "of the pool, also as 512MiB or 2GiB (default: what max-num-seqs sequences need, at "
            "most 40 %% of the free memory, or all that may be taken of a GPU's)",
            {"type": size_in_bytes, "metavar": "SIZE"},
        ),
        Option("--num-gpu-blocks-override", "blocks of the pool, whatever the memory", _INT),
        Option(
            "--swap-space",
            "GiB of the host's memory for blocks of preempted sequences and for what the prefix "
            "cache evicts (default: 0, both are computed again)",
            _FLOAT,
        ),
        Option(
            "--preemption-mode",
            "swap, recompute, or auto: what is measured to cost less (default: auto)",
            _NAME,
        ),
    ),
    "scheduling": (
        Option("--max-num-seqs", "most sequences that run at once (default: 64)", _INT),
        Option("--max-num-batched-tokens", "most tokens of one step (default: 512)", _INT),
        Option(
            "--long-prefill-token-threshold",
            "most tokens of one sequence in a step (default: 0, no such limit)",
            _INT,
        ),
        Option(
            "--scheduling-policy",
            "fcfs, priority, or longest-prefix: what finds most in the prefix cache first "
            "(default: fcfs)",
            _NAME,
        ),
        Option(
            "--enable-prefix-caching",
            "begin with KV blocks that others have computed (the default)",
            _ON,
        ),
        Option(
            "--no-enable-prefix-caching",
            "compute every prompt from its first token",
            _OFF,
            "enable_prefix_caching",
        ),
        Option(
            "--prefix-cache",
            "how these blocks are found: radix, a tree of them, or hash, a table (default: radix)",
            _NAME,
        ),
        Option("--watermark", "share of the pool left free on admission (default: 0.01)", _FLOAT),
        Option("--max-num-queued-reqs", "most requests that wait (default: no limit)", _INT),
        Option("--max-num-queued-tokens", "most tokens that wait (default: no limit)", _INT),
        Option("--max-logprobs", "most logprobs a request may ask for (default: 20)", _INT),
        Option("--engine-seed", "draws seeds where none is given (default: 0)", _INT, "seed"),
    ),
    "finding faults": (
        Option("--kv-sanitizer", "check every step for memory errors of the KV pool", _ON),
        Option(
            "--trace",
            "record every step, prompts and answers included, for `cupaged trace`",
            {"metavar": "FILE"},
        ),
    ),
}
SAMPLING = {
    "sampling": (
        Option("--temperature", "0 takes the likeliest token (default: 0)", _FLOAT),
        Option("--top-p", "keep the likeliest tokens of this mass (default: 1)", _FLOAT),
        Option("--top-k", "keep that many of the likeliest (default: 0, all)", _INT),
        Option("--min-p", "drop tokens below this share of the best one (default: 0)", _FLOAT),
        Option("-s --seed", "equal seeds give equal answers (default: drawn)", _INT),
    ),
    "penalties and biases": (
        Option("--presence-penalty", "-2 to 2, for tokens in the answer (default: 0)", _FLOAT),
        Option("--frequency-penalty", "-2 to 2, for each time they occur (default: 0)", _FLOAT),
        Option("--repetition-penalty", "> 1 against tokens seen before (default: 1)", _FLOAT),
        Option(
            "--logit-bias",
            'token ids and what is added, as JSON: {"17": -5}',
            {"type": logit_bias, "metavar": "JSON"},
        ),
        Option("--allowed-token-ids", "draw only these, such as 5,17,2", _IDS),
        Option("--bad-words", "never write this (may be repeated)", _TEXTS),
    ),
    "end of an answer": (
        Option("--max-tokens", "most tokens of it (default: the rest of the context)", _INT),
        Option("--min-tokens", "fewest tokens of it (default: 0)", _INT),
        Option("--stop", "end before this text (may be repeated)", _TEXTS),
        Option("--include-stop-str-in-output", "keep that text in the answer", _ON),
        Option("--stop-token-ids", "end at one of these", _IDS),
        Option("--ignore-eos", "go on after the end of text", _ON),
        Option("--no-skip-special-tokens", "show them in the text", _OFF, "skip_special_tokens"),
    ),
}  # fmt: skip
REPORT = {
    "for programs": (
        Option("--logprobs", "of each token and of the K likeliest", {**_INT, "metavar": "K"}),
        Option(
            "--prompt-logprobs", "the same for the tokens of the prompt", {**_INT, "metavar": "K"}
        ),
        Option("--no-detokenize", "token ids only, no text", _OFF, "detokenize"),
        Option("--trace-decode-token-ids", "force the first tokens of the answer", _IDS),
    ),
}
BEAMS = {
    "beam search": (
        Option("--beam-width", "search with N beams for the N best answers", _INT),
        Option("--length-penalty", "rank by log probability / length ** X (default: 1)", _FLOAT),
        Option(
            "--early-stopping",
            "true: end with N finished answers; false: when no beam can become better at its "
            "length; never: at any length (default: false)",
            {"type": early_stopping, "metavar": "WHEN"},
        ),
    ),
}
_NOTES = {
    "sampling": "What the model's authors recommend goes before these defaults.",
    "beam search": "Instead of sampling; --max-tokens has to be given.",
}
DEFAULTS = {"temperature": 0.0, "max_tokens": None}
_ALL_SAMPLING = {**SAMPLING, **REPORT}


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, by its place or by `--model`, and `--verbose`."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    parser.add_argument("-m", "--model", dest="model_flag", metavar="MODEL", help="the same")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens to stderr")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How the model is loaded and how requests are served."""
    add_groups(parser, ENGINE)


def add_sampling_options(parser: argparse.ArgumentParser, *, report: bool = False) -> None:
    """How tokens are drawn and when an answer ends; with `report`, what JSON tells about them."""
    add_groups(parser, _ALL_SAMPLING if report else SAMPLING)


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """`--chat-template FILE`."""
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja file that replaces the model's chat template",
    )


def chosen_model(args: argparse.Namespace) -> str | None:
    """The model that was named, however it was."""
    place, flag = args.model, args.model_flag
    if None not in (place, flag) and place != flag:
        raise ConfigError(
            "--model", flag, f"the same as MODEL={place!r}, or only one of them given"
        )
    model: str | None = flag if place is None else place
    return model


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM`: those that were given."""
    options = {"model": chosen_model(args), **given_options(args, ENGINE)}
    if getattr(args, "chat_template", None) is not None:
        options["chat_template"] = read_text(args.chat_template)
    return options


def sampling_params(
    args: argparse.Namespace, recommended: Mapping[str, Any] = MappingProxyType({})
) -> SamplingParams:
    """What was given, else what the model's authors recommend, else greedy and unlimited."""
    from cupaged.sampling_params import SamplingParams

    return SamplingParams(**{**DEFAULTS, **recommended, **given_sampling_options(args)})


def given_sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams`: only those that were given."""
    given = given_options(args, _ALL_SAMPLING)
    number = getattr(args, "num_samples", None)
    return given if number is None else {**given, "n": number}


def beam_search_params(args: argparse.Namespace) -> BeamSearchParams | None:
    """What was given of a search, None if nothing was.

    Raises:
        ConfigError: an option that means nothing in a search, or without one.
    """
    from cupaged.sampling_params import BeamSearchParams

    given, others = given_options(args, BEAMS), given_sampling_options(args)
    if not given:
        return None
    for name in ("beam_width", "max_tokens"):
        if name not in {**given, **others}:
            raise ConfigError(name, None, "given in a beam search")
    for name, value in others.items():
        if name not in BeamSearchParams.field_names():
            raise ConfigError(name, value, "left out in a beam search")
    return BeamSearchParams(**given, **others)


def add_groups(parser: argparse.ArgumentParser, groups: Mapping[str, tuple[Option, ...]]) -> None:
    """The options of a table, each group under its title."""
    for title, options in groups.items():
        group = parser.add_argument_group(title, _NOTES.get(title))
        for option in options:
            group.add_argument(*option.flags.split(), help=option.help, **option.settings)


def given_options(
    args: argparse.Namespace, groups: Mapping[str, tuple[Option, ...]]
) -> dict[str, Any]:
    """The values of a table's options by their fields: only those that were given."""
    return {
        option.field or option.dest: value
        for options in groups.values()
        for option in options
        if (value := getattr(args, option.dest, None)) is not None
    }
