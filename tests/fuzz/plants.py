"""Defects to plant into a copy of the package, each of which the traces must find.

A test suite is only as good as the faults it sees. Every plant replaces one text of one file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Plant:
    """`old` occurs exactly once in `file` and is replaced by `new`."""

    name: str
    file: str
    old: str
    new: str

    def apply(self, package: Path) -> None:
        """Change the copy of the package in folder `package`."""
        path = package / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {text.count(self.old)} times")
        path.write_text(text.replace(self.old, self.new))


_MANAGER, _SCHEDULER = "engine/block_manager.py", "engine/scheduler.py"
_POLICY, _DOOR = "engine/scheduling_policy.py", "engine/door.py"
_BATCH, _SAMPLING = "engine/batch.py", "engine/sampling_batch.py"
_CORE, _REQUEST = "engine/core.py", "request.py"

PLANTS = (
    Plant(
        "fork takes no references",
        _MANAGER,
        "self.ref_counts[self.block_table[row, :held]] += 1",
        "self.ref_counts[self.block_table[row, :held]] += 0",
    ),
    Plant(
        "a block too few after a block edge",
        _MANAGER,
        "return -(-num_tokens // self.block_size)",
        "return -(-(num_tokens - 1) // self.block_size)",
    ),
    Plant(
        "a block too many at a block edge",
        _MANAGER,
        "return -(-num_tokens // self.block_size)",
        "return num_tokens // self.block_size + 1",
    ),
    Plant(
        "the partial block is not looked at for sharing",
        _MANAGER,
        "first = num_computed_tokens // self.block_size",
        "first = self.blocks_for(num_computed_tokens)",
    ),
    Plant(
        "a block shared by two is not copied",
        _MANAGER,
        "is_shared = self.ref_counts[written] > 1",
        "is_shared = self.ref_counts[written] > 2",
    ),
    Plant(
        "copies are not asked for",
        _MANAGER,
        "copies.append((source, private))",
        "pass",
    ),
    Plant(
        "a copied block keeps its reference",
        _MANAGER,
        "self.ref_counts[source] -= 1",
        "self.ref_counts[source] -= 0",
    ),
    Plant(
        "a block that a step in flight copies from is written",
        _MANAGER,
        "if not all(copied.isdisjoint(private) for copied in self._in_flight.values()):",
        "if False:",
    ),
    Plant(
        "no quarantine",
        _MANAGER,
        "if self._in_flight:\n            self._quarantine",
        "if False:\n            self._quarantine",
    ),
    Plant(
        "quarantine ends with the oldest step",
        _MANAGER,
        "self._quarantine.append((max(self._in_flight)",
        "self._quarantine.append((min(self._in_flight)",
    ),
    Plant(
        "quarantine ends with any step",
        _MANAGER,
        "(oldest is None or self._quarantine[0][0] < oldest)",
        "True",
    ),
    Plant(
        "freed blocks are lost",
        _MANAGER,
        "self._release(blocks[::-1])",
        "self._release(blocks[:0:-1])",
    ),
    Plant(
        "a freed row keeps its blocks",
        _MANAGER,
        "self.block_table[row, :held] = UNUSED",
        "self.block_table[row, 1:held] = UNUSED",
    ),
    Plant(
        "only the last sequence's copies are made",
        _SCHEDULER,
        "plan.copies += copies",
        "plan.copies = copies",
    ),
    Plant(
        "the plan looks at the live block table",
        _SCHEDULER,
        "plan.block_tables = (self.block_manager.block_table[rows, :width],)",
        "plan.block_tables = (self.block_manager.block_table[rows, :width],)\n"
        "        if len(rows) == 1:\n"
        "            view = self.block_manager.block_table[rows[0] : rows[0] + 1, :width]\n"
        "            plan.block_tables = (view,)",
    ),
    Plant(
        "a preempted sequence keeps its blocks",
        _SCHEDULER,
        "self.block_manager.free(sequence.order)\n        sequence.status",
        "sequence.status",
    ),
    Plant(
        "a preempted sequence keeps its count of computed tokens",
        _SCHEDULER,
        "sequence.num_computed_tokens = 0",
        "pass",
    ),
    Plant(
        "a sequence of this step is preempted",
        _SCHEDULER,
        "victim = self.running[-1]",
        "victim = self.running[0]",
    ),
    Plant(
        "a step in flight does not hold up preemption",
        _SCHEDULER,
        "if self.num_in_flight:  # what",
        "if False:  # what",
    ),
    Plant(
        "preempted sequences go to the end",
        _POLICY,
        "self._queue.move_to_end(sequence.order, last=False)",
        "pass",
    ),
    Plant(
        "one token over the budget",
        _SCHEDULER,
        "num_new = min(left, budget, self._max_chunk)",
        "num_new = min(left, budget + 1, self._max_chunk)",
    ),
    Plant(
        "the first chunk of a long prompt is not cut",
        _SCHEDULER,
        "num_new = min(sequence.num_tokens, budget, self._max_chunk)",
        "num_new = min(sequence.num_tokens, budget)",
    ),
    Plant(
        "an empty query when the budget is used up",
        _SCHEDULER,
        "while position < len(self.running) and budget > 0:",
        "while position < len(self.running) and budget >= 0:",
    ),
    Plant(
        "admission when only the first chunk fits",
        _SCHEDULER,
        "allocate(sequence.order, 0, sequence.num_tokens, reserve=reserve)",
        "allocate(sequence.order, 0, min(budget, sequence.num_tokens), reserve=reserve)",
    ),
    Plant(
        "samples that are not forked yet count as one",
        _SCHEDULER,
        "sum(s.num_pending_samples for s in self.running)",
        "len(self.running)",
    ),
    Plant(
        "a sequence is in two steps at once",
        _SCHEDULER,
        "if not sequence.in_flight:",
        "if True:",
    ),
    Plant(
        "slots from the neighbour's blocks",
        _BATCH,
        "table[sequence, positions // block_size]",
        "table[sequence - 1, positions // block_size]",
    ),
    Plant(
        "positions count from the step's first token",
        _BATCH,
        "(start - query_start[:-1])[sequence]",
        "start[sequence]",
    ),
    Plant(
        "tokens begin one place late",
        _BATCH,
        "e.sequence.token_ids[e.start : e.start + e.num_tokens]",
        "(e.sequence.token_ids * 2)[e.start + 1 : e.start + 1 + e.num_tokens]",
    ),
    Plant(
        "every sequence draws as sample 0",
        _SAMPLING,
        "sample_index=first_index[logits_row] + since_first.astype(np.int32)",
        "sample_index=since_first.astype(np.int32)",
    ),
    Plant(
        "stop tokens are banned one token too long",
        _SAMPLING,
        "if num_tokens < r.min_tokens",
        "if num_tokens <= r.min_tokens",
    ),
    Plant(
        "a child skips its first token",
        _REQUEST,
        "child.num_computed_tokens = self.num_computed_tokens",
        "child.num_computed_tokens = self.num_computed_tokens + 1",
    ),
    Plant(
        "a child computes the prompt again",
        _REQUEST,
        "child.num_computed_tokens = self.num_computed_tokens",
        "child.num_computed_tokens = 0",
    ),
    Plant(
        "parent and child share one list of tokens",
        _REQUEST,
        "self.token_ids.copy()",
        "self.token_ids",
    ),
    Plant(
        "a failed step takes its requests out only halfway",
        _CORE,
        'in request.unfinished():\n                    self._finish(sequence, "error")',
        "in [e.sequence for e in plan.scheduled if e.sequence.request is request]:\n"
        '                    self._finish(sequence, "error")',
    ),
    Plant(
        "a failed step takes all of its requests along",
        _CORE,
        "isinstance(error, Exception) and len(requests) > 1:",
        "isinstance(error, Exception) and len(requests) > 1000:",
    ),
    Plant(
        "a suspect is never tried alone",
        _SCHEDULER,
        "self._suspects.appendleft((entry.sequence, entry.start + entry.num_tokens))",
        "self._suspects.appendleft((entry.sequence, 0))",
    ),
    Plant(
        "a suspect keeps what it had computed",
        _SCHEDULER,
        "sequence.status = SequenceStatus.PREEMPTED\n        sequence.num_computed_tokens = 0",
        "sequence.status = SequenceStatus.PREEMPTED",
    ),
    Plant(
        "an ended request takes a later one of its name along",
        _CORE,
        "if request.finished and self._requests.get(request_id) is request:",
        "if request.finished and request_id in self._requests:",
    ),
    Plant(
        "an abort before the fork ends all samples",
        _CORE,
        "if index is not None and not request.has_forked:",
        "if False:",
    ),
    Plant(
        "outputs of an aborted sequence are delivered",
        _CORE,
        "if parent.status is not SequenceStatus.RUNNING:",
        "if False:",
    ),
    Plant(
        "one token more than max_tokens",
        _CORE,
        "if sequence.num_output_tokens >= sequence.request.max_tokens:",
        "if sequence.num_output_tokens > sequence.request.max_tokens:",
    ),
    Plant(
        "the last token is thought to need a slot",
        _DOOR,
        "fitting = pool - prompt_length + 1",
        "fitting = pool - prompt_length",
    ),
)
