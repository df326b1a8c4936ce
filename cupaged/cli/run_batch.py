"""`cupaged run-batch`: a file of requests, one a line, to a file of answers."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from cupaged.cli.batch_forms import Form, PlainForm
from cupaged.cli.batch_run import BatchRun, LineReader
from cupaged.cli.openai_forms import openai_forms
from cupaged.cli.options import (
    DEFAULTS,
    add_chat_template,
    add_engine_options,
    add_model,
    add_sampling_options,
    engine_options,
    given_sampling_options,
    sampling_params,
)
from cupaged.cli.records import json_line
from cupaged.cli.streams import STDIN, StreamError, reason, shown, standard_input, tell

_MIN_WINDOW = 256
_SEQUENCES_AHEAD = 4  # lines in memory for each sequence that may run
_SECONDS_BETWEEN = {True: 0.5, False: 10.0}  # progress on a terminal, and elsewhere


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "run-batch",
        help="answer a file of requests",
        usage="cupaged run-batch [MODEL] [-i FILE] [-o FILE] [options]",
        description='Each line of input is JSON: {"prompt" or "messages" or "prompt_token_ids": '
        '..., "sampling_params": {...}, "id": ...}, or a line of an OpenAI batch file for '
        "/v1/chat/completions or /v1/completions. Answers come in the order of the lines, all "
        "requests run at the same time, and a line that fails gets an error object while the "
        "others are served; the exit code is then 1. A file is written line by line under the "
        "name FILE.partial and gets its own name when it is whole.",
        example="cupaged run-batch -i requests.jsonl -o answers.jsonl --max-tokens 200",
    )
    add_model(parser)
    parser.add_argument(
        "-i", "--input-file", metavar="FILE", default=STDIN, help="requests (default: -, stdin)"
    )
    parser.add_argument(
        "-o", "--output-file", metavar="FILE", default=STDIN, help="answers (default: -, stdout)"
    )
    parser.add_argument(
        "-n", "--num-samples", type=int, metavar="N", help="answers a prompt (default: 1)"
    )
    add_chat_template(parser)
    add_sampling_options(parser, report=True)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Open the files, load the model, answer every line."""
    from cupaged.llm import LLM
    from cupaged.loading.model_files import DEFAULT_MODEL_REPO

    sampling_params(args)  # a wrong option is better told now than once a line
    options = engine_options(args)
    with ExitStack() as opened, make_output(args.output_file) as output:
        source = opened.enter_context(_opened(args.input_file))
        llm = LLM(**options)
        given = {**llm.engine.generation_defaults, **given_sampling_options(args)}
        plain = PlainForm(llm, {**DEFAULTS, **given})
        openai = openai_forms(llm, given, options["model"] or DEFAULT_MODEL_REPO)

        def form_of(line: Mapping[str, Any]) -> Form:
            return openai(line) or plain

        config = llm.engine.core.config
        window = max(_MIN_WINDOW, _SEQUENCES_AHEAD * config.max_num_seqs)
        batch = BatchRun(llm.engine, LineReader(source), form_of, window)
        opened.pop_all()  # the reader's thread closes it
        progress = Progress(batch)
        for record in batch.records(progress.show):
            output.write(json_line(record))
        progress.end()
    return int(batch.num_failed > 0)


class Progress:
    """Counts on standard error: in place on a terminal, now and then a line elsewhere."""

    def __init__(self, batch: BatchRun) -> None:
        self._batch = batch
        self._in_place = sys.stderr is not None and sys.stderr.isatty()
        self._start = self._shown = time.monotonic()

    def show(self) -> None:
        """If it is time."""
        now = time.monotonic()
        if now - self._shown >= _SECONDS_BETWEEN[self._in_place]:
            self._shown = now
            if self._in_place:
                tell(f"\r{self._figures()}\x1b[K", end="")
            else:
                tell(self._figures())

    def end(self) -> None:
        """The last figures."""
        tell(f"\r{self._figures()}\x1b[K" if self._in_place else self._figures())

    def _figures(self) -> str:
        batch, seconds = self._batch, time.monotonic() - self._start
        return (
            f"run-batch: {batch.num_answered} answered, {batch.num_failed} failed, "
            f"{batch.num_tokens} tokens in {seconds:.1f} s "
            f"({batch.num_tokens / max(seconds, 1e-9):.1f} tokens/s)"
        )


class Output(AbstractContextManager["Output"]):
    """Lines of text to standard output, or to something that is no plain file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._file = None if self._path == STDIN else self._open(self._path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: str) -> None:
        """One line, which is on its way when this returns."""
        data = line.encode("utf-8", "replace")
        if self._file is None:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            return
        try:
            self._file.write(data)
        except OSError as error:
            raise StreamError(f"{self._path}: cannot be written: {reason(error)}") from None

    def _open(self, path: str | Path) -> BinaryIO:
        try:
            return open(path, "wb", buffering=0)
        except OSError as error:
            raise StreamError(f"{self._path}: cannot be written: {reason(error)}") from None


class WholeFile(Output):
    """A plain file that appears when all of it is there; until then it is called FILE.partial."""

    def __enter__(self) -> Self:
        self._target = Path(os.path.realpath(self._path))
        self._partial = self._target.with_name(f"{self._target.name}.partial")
        self._file = self._open(self._partial)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            os.replace(self._partial, self._target)
        elif self._partial.stat().st_size:
            tell(f"\nwhat was answered so far is in {self._partial}")
        else:
            self._partial.unlink()


def make_output(path: str) -> Output:
    """Whole files by way of a partial one; pipes, devices and standard output directly."""
    try:
        plain = stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        plain = True  # not there yet
    return WholeFile(path) if plain and path != STDIN else Output(path)


def _opened(path: str) -> BinaryIO:
    """The input; standard input by a file object of its own, which a thread may hold for ever."""
    try:
        if path == STDIN:
            return open(standard_input().fileno(), "rb", closefd=False)
        return open(path, "rb")
    except OSError as error:
        raise StreamError(f"{shown(path)}: cannot be read: {reason(error)}") from None
