"""Lines in, records out: every request that fits in flight at once, and the order kept.

A thread reads a little ahead, so that a writer that waits for answers gets them. Beside these, at
most `window` lines are in memory: those in flight, and answered ones that wait for an earlier one.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from cupaged.cli.batch_forms import BatchRequest, Form, Record
from cupaged.cli.streams import StreamError, decoded
from cupaged.errors import CupagedError, EngineError, PromptError, QueueFullError

if TYPE_CHECKING:
    from cupaged.engine.engine import Engine
    from cupaged.outputs import RequestOutput

MAX_LINE_BYTES = 16 << 20
LINES_AHEAD = 64
Item = tuple[int, bytes] | OSError | None  # a numbered line, a failure to read, or the end


class LineReader:
    """The lines of a file that are not blank, read by a thread that is a few lines ahead.

    The thread closes the file at its end. Nobody else may: it can be waiting for a line.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._items: queue.Queue[Item] = queue.Queue(LINES_AHEAD)
        self.ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def get(self, *, wait: bool) -> tuple[int, bytes] | None:
        """The next line, or None if there is none, or none yet and nobody waits for it."""
        if self.ended:
            return None
        try:
            item = self._items.get(block=wait)
        except queue.Empty:
            return None
        if isinstance(item, OSError):
            raise StreamError(f"the input cannot be read: {item.strerror}")
        self.ended = item is None
        return item

    def _read(self) -> None:
        number = 0
        try:
            while line := self._file.readline(MAX_LINE_BYTES + 1):
                number += 1
                whole = line
                while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    line = self._file.readline(MAX_LINE_BYTES + 1)  # the rest goes unread
                if whole.strip():
                    self._items.put((number, whole))
            self._items.put(None)
        except OSError as error:
            self._items.put(error)
        self._file.close()


@dataclass(slots=True)
class _Line:
    """A line on its way. record: its answer, once there is one."""

    number: int
    form: Form
    head: Record
    request: BatchRequest | None = None
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)  # by request id
    record: Record | None = None
    failed: bool = False

    def fail(self, error: Exception) -> None:
        self.failed = True
        self.record = self.form.failure(self.head, error)


class BatchRun:
    """Serves lines.

    Args:
        form_of: which form a line has; of an empty one, how its failure is told.
        window: most lines in memory.
    """

    def __init__(
        self,
        engine: Engine,
        reader: LineReader,
        form_of: Callable[[Mapping[str, Any]], Form],
        window: int,
    ) -> None:
        self.num_answered = 0
        self.num_failed = 0
        self.num_tokens = 0
        self._engine = engine
        self._reader = reader
        self._form_of = form_of
        self._window = window
        self._lines: deque[_Line] = deque()
        self._by_request: dict[str, _Line] = {}
        self._held: _Line | None = None  # it waits for room in the engine's queue

    def records(self, on_step: Callable[[], None]) -> Iterator[Record]:
        """A record a line, in the order of the lines. on_step: called after each step."""
        while True:
            self._fill()
            while self._lines and self._lines[0].record is not None:
                line = self._lines.popleft()
                self.num_failed += line.failed
                self.num_answered += not line.failed
                yield line.record or {}
            if self._engine.has_unfinished_requests:
                self._step()
                on_step()
            elif self._reader.ended and not self._lines:
                return

    def _fill(self) -> None:
        """Take lines in while there is room for them."""
        if self._held is not None:
            held, self._held = self._held, None
            self._submit(held)
        while self._held is None and len(self._lines) < self._window:
            idle = not self._lines and not self._engine.has_unfinished_requests
            item = self._reader.get(wait=idle)
            if item is None:
                return
            line = self._parsed(*item)
            self._lines.append(line)
            if line.record is None:
                self._submit(line)

    def _parsed(self, number: int, data: bytes) -> _Line:
        """A line as a request, or with the record of its failure."""
        form = self._form_of({})
        line = _Line(number, form, form.head(number, {}))
        try:
            value = _json_object(data)
            line.form = self._form_of(value)
            line.head = line.form.head(number, value)
            line.request = line.form.request(value)
        except CupagedError as error:
            line.fail(error)
        return line

    def _submit(self, line: _Line) -> None:
        """Hand all prompts of a line to the engine, or none."""
        request = line.request
        assert request is not None
        try:
            for i, prompt in enumerate(request.prompts):
                request_id = f"{line.number}-{i}"
                self._engine.add_request(
                    request_id, prompt, request.params, priority=request.priority
                )
                line.outputs[request_id] = None
                self._by_request[request_id] = line
        except QueueFullError as error:
            self._withdraw(line)
            if self._engine.has_unfinished_requests:
                self._held = line
            else:  # more prompts in this one line than may ever wait
                line.fail(error)
        except CupagedError as error:
            self._withdraw(line)
            line.fail(error)

    def _withdraw(self, line: _Line) -> None:
        for request_id in line.outputs:
            self._engine.abort(request_id)
            self._by_request.pop(request_id, None)
        line.outputs.clear()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except EngineError as error:
            lost = {i: line for i, line in self._by_request.items() if not self._holds(i)}
            for line in lost.values():
                self._withdraw(line)
                line.fail(error)
            return
        for output in outputs:
            if output.finished:
                line = self._by_request.pop(output.request_id)
                self.num_tokens += sum(len(c.token_ids) for c in output.outputs)
                line.outputs[output.request_id] = output
                self._end_if_done(line)

    def _holds(self, request_id: str) -> bool:
        return self._engine.core.holds(request_id)

    def _end_if_done(self, line: _Line) -> None:
        outputs = [output for output in line.outputs.values() if output is not None]
        if len(outputs) < len(line.outputs):
            return
        assert line.request is not None
        if any(c.finish_reason == "error" for output in outputs for c in output.outputs):
            line.fail(EngineError("the model gave no number that a token could be drawn from"))
        else:
            line.record = line.form.answer(line.head, line.request, outputs)


def _json_object(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_LINE_BYTES:
        raise PromptError("length of the line in bytes", len(data), f"at most {MAX_LINE_BYTES}")
    text = decoded(data, "the line").removeprefix("\ufeff")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError("line", text.strip(), f"a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise PromptError("line", value, "a JSON object")
    return value
