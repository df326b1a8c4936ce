"""Defects to plant into a copy of the package, each of which the traces must find.

A test suite is only as good as the faults it sees.
"""

from __future__ import annotations

from tests.fuzz.plant import Plant
from tests.fuzz.table_plants import TABLE_PLANTS

_MANAGER, _SCHEDULER = "engine/block_manager.py", "engine/scheduler.py"
_POLICY, _DOOR = "engine/scheduling_policy.py", "engine/door.py"
_BATCH, _SAMPLING = "engine/batch.py", "engine/sampling_batch.py"
_RESULTS = "engine/step_results.py"
_CORE, _REQUEST = "engine/core.py", "request.py"
_NAMES, _PREFIXES = "engine/block_names.py", "engine/prefix_cache.py"

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
        "if unreferenced and self._in_flight:",
        "if False:",
    ),
    Plant(
        "quarantine ends with the oldest step",
        _MANAGER,
        "self._hold_back(unreferenced, max(self._in_flight))",
        "self._hold_back(unreferenced, min(self._in_flight))",
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
        "self.block_table[row, : len(blocks)] = UNUSED",
        "self.block_table[row, 1 : len(blocks)] = UNUSED",
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
        "plan.block_tables = (self.block_manager.block_table[plan.rows, :width],)",
        "plan.block_tables = (self.block_manager.block_table[plan.rows, :width],)\n"
        "        if len(plan.rows) == 1:\n"
        "            first = plan.rows[0]\n"
        "            view = self.block_manager.block_table[first : first + 1, :width]\n"
        "            plan.block_tables = (view,)",
    ),
    Plant(
        "a preempted sequence keeps its blocks",
        _SCHEDULER,
        "        self._leave(sequence)\n        sequence.status = SequenceStatus.PARKED",
        "        self.running.remove(sequence)\n        self._rows = None\n"
        "        self.table.leave(sequence)\n        sequence.status = SequenceStatus.PARKED",
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
        "(budget - np.cumsum(wanted) + wanted)",
        "(budget + 1 - np.cumsum(wanted) + wanted)",
    ),
    Plant(
        "the first chunk of a long prompt is not cut",
        _SCHEDULER,
        "number = min(uncached, budget, self._max_chunk)",
        "number = min(uncached, budget)",
    ),
    Plant(
        "an empty query when the budget is used up",
        _SCHEDULER,
        "np.flatnonzero(num_new[: min(stop, len(self.running))])",
        "np.flatnonzero(left[: min(stop, len(self.running))])",
    ),
    Plant(
        "admission when only the first chunk fits",
        _SCHEDULER,
        "sequence.order, cached, sequence.num_tokens, reserve=reserve",
        "sequence.order, cached, len(cached) * self.config.block_size + 1, reserve=reserve",
    ),
    Plant(
        "samples that are not forked yet count as one",
        _SCHEDULER,
        'int(records["num_pending_samples"][records["serial"] != NONE].sum())',
        'int(np.count_nonzero(records["serial"] != NONE))',
    ),
    Plant(
        "a sequence is in two steps at once",
        _SCHEDULER,
        'np.where(records["in_flight"], 0, records["num_tokens"] - start)',
        'records["num_tokens"] - start',
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
        "sequences[i].token_ids[position : position + stop - first]",
        "(sequences[i].token_ids * 2)[position + 1 : position + 1 + stop - first]",
    ),
    Plant(
        "every sequence draws as sample 0",
        _SAMPLING,
        'sample_index=records["index"][logits_row] + since_first.astype(np.int32)',
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
        "self._suspects.appendleft((sequence, num_tokens))",
        "self._suspects.appendleft((sequence, 0))",
    ),
    Plant(
        "a suspect keeps what it had computed",
        _SCHEDULER,
        "sequence.status = SequenceStatus.PARKED\n        sequence.num_computed_tokens = 0",
        "sequence.status = SequenceStatus.PARKED",
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
        _RESULTS,
        "np.flatnonzero(are_running & (plan.num_samples == 1))",
        "np.flatnonzero(plan.num_samples == 1)",
    ),
    Plant(
        "one token more than max_tokens",
        _RESULTS,
        "if sequence.num_output_tokens >= sequence.request.max_tokens:",
        "if sequence.num_output_tokens > sequence.request.max_tokens:",
    ),
    Plant(
        "the last token is thought to need a slot",
        _DOOR,
        "fitting = pool - prompt_length + 1",
        "fitting = pool - prompt_length",
    ),
    Plant(
        "a block's name leaves out the blocks before it",
        _NAMES,
        "name = hash_block(names[-1], tokens)",
        "name = hash_block(NO_PARENT, tokens)",
    ),
    Plant(
        "the salt is ignored",
        _NAMES,
        "for kind, value in extras:",
        "for kind, value in ():",
    ),
    Plant(
        "a block is stored before it is written",
        _SCHEDULER,
        "        self.num_in_flight += 1\n",
        "        self.num_in_flight += 1\n"
        "        for entry in plan.scheduled:\n"
        "            sequence, before = entry.sequence, entry.sequence.num_computed_tokens\n"
        "            sequence.num_computed_tokens = entry.start + entry.num_tokens\n"
        "            if sequence.num_computed_tokens >= sequence.store_at:\n"
        "                self.block_manager.store(sequence.order, sequence)\n"
        "            sequence.num_computed_tokens = before\n",
    ),
    Plant(
        "a block is stored when its tokens are known but not all computed",
        _PREFIXES,
        "stop = sequence.num_computed_tokens // size",
        "stop = max(sequence.num_computed_tokens, sequence.num_tokens - 1) // size",
    ),
    Plant(
        "a found block can still be evicted",
        _PREFIXES,
        "self._evictable.pop(block, None)",
        "pass",
    ),
    Plant(
        "the most recently used block is evicted first",
        _PREFIXES,
        "popitem(last=False)",
        "popitem(last=True)",
    ),
    Plant(
        "blocks are evicted before free ones are used up",
        _MANAGER,
        "            if not self._free:\n",
        "            if not self._free or self.prefix_cache.num_evictable_blocks:\n",
    ),
    Plant(
        "an evicted block can still be found",
        _PREFIXES,
        "        del self._block_of[name]\n        if names",
        "        if names",
    ),
    Plant(
        "the last of two equal blocks is found, not the first",
        _PREFIXES,
        "block = self._block_of.setdefault(name, blocks[i])",
        "block = self._block_of[name] = blocks[i]",
    ),
    Plant(
        "the blocks of a failed step are shared",
        _CORE,
        "self.scheduler.give_up(plan)",
        "self.scheduler.complete(plan)",
    ),
    Plant(
        "the blocks of a request that ended with an error are shared",
        _CORE,
        'if reason == "error":',
        "if False:",
    ),
    Plant(
        "a full hit leaves nothing to compute",
        _REQUEST,
        "return len(self.token_ids) - 1",
        "return len(self.token_ids)",
    ),
    Plant(
        "a hit reaches one block less far than it may",
        _PREFIXES,
        "range(sequence.num_skippable_tokens // self._block_size)",
        "range((sequence.num_skippable_tokens - 1) // self._block_size)",
    ),
    Plant(
        "who opted out finds prefixes",
        _PREFIXES,
        "            return []\n        blocks: list[int] = []",
        "            pass\n        blocks: list[int] = []",
    ),
    Plant(
        "who opted out leaves prefixes",
        _PREFIXES,
        "            return\n        sequence.num_stored_blocks",
        "            pass\n        sequence.num_stored_blocks",
    ),
    Plant(
        "what was computed before a reset is stored after it",
        _SCHEDULER,
        "for sequence in self.running:\n            sequence.store_at",
        "for sequence in ():\n            sequence.store_at",
    ),
    Plant(
        "parent and child share one list of names",
        _REQUEST,
        "self.block_names.copy()",
        "self.block_names",
    ),
    Plant(
        "found blocks count as free and as found",
        _MANAGER,
        "num_new > num_free or num_new + sum(are_idle) > num_free:",
        "num_new > num_free:",
    ),
    Plant(
        "a block found in quarantine stays there",
        _MANAGER,
        "self._freed.pop(block, None)",
        "pass",
    ),
    Plant(
        "a resumed sequence takes no references on what it found",
        _MANAGER,
        "self.ref_counts[blocks] += 1",
        "self.ref_counts[blocks] = 1",
    ),
    *TABLE_PLANTS,
)
