"""llama.cpp as a runner: a loop of continuous batching over `llama_decode`.

Every step decodes the running sequences and, in the same batch, as many waiting prompts as have a
free sequence and fit `n_batch`; the library cuts that into micro-batches. This is what its own
server does. The server of llama-cpp-python is not measured: it takes one request at a time.
The cache has llama.cpp's default type, F16, whatever the weights are.

Weights are laid out anew for the processor's units, which is its default, or stay as the file has
them, as the way "plain": on processors with AMX version 0.3.36 ends by a segmentation fault with
Q4_1 weights that were laid out for it.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.peers.runner import Options, Requests, serve

START = time.perf_counter()

import llama_cpp  # noqa: E402
import numpy as np  # noqa: E402

IMPORT_S = time.perf_counter() - START
N_BATCH, N_UBATCH = 2048, 512  # its defaults


@dataclass(slots=True)
class Running:
    """A request that holds a sequence of the context."""

    request: int
    left: int  # tokens still to come
    position: int  # of the next token to decode
    output: list[int] = field(default_factory=list)


class LlamaCpp:
    """A context with as many sequences as may run."""

    def __init__(self, options: Options) -> None:
        self._log = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        how = llama_cpp.llama_model_default_params()
        how.use_extra_bufts = options.way == ""
        model = llama_cpp.llama_model_load_from_file(options.model.encode(), how)
        if model is None:
            raise RuntimeError(f"llama.cpp cannot load {options.model}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = options.max_num_seqs * options.max_model_len
        params.n_seq_max = options.max_num_seqs
        params.n_batch, params.n_ubatch = N_BATCH, N_UBATCH
        params.n_threads = params.n_threads_batch = options.threads
        params.kv_unified = False  # one cache for all would be read in whole for every sequence
        self._context: Any = llama_cpp.llama_init_from_model(model, params)
        if self._context is None:
            raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens")
        self._memory: Any = llama_cpp.llama_get_memory(self._context)
        vocab = llama_cpp.llama_model_get_vocab(model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch: Any = llama_cpp.llama_batch_init(N_BATCH, 0, 1)
        self._max_num_seqs = options.max_num_seqs

    def versions(self) -> dict[str, str]:
        """And what of the processor it was built for."""
        system = llama_cpp.llama_print_system_info().decode().strip()
        return {"llama-cpp-python": llama_cpp.__version__, "system": system}

    def generate(self, requests: Requests) -> list[list[int]]:
        """All at once."""
        waiting = deque(enumerate(requests))
        running: dict[int, Running] = {}
        free = list(range(self._max_num_seqs))
        outputs: list[list[int]] = [[] for _ in requests]
        while waiting or running:
            self._batch.n_tokens = 0
            rows = {seq: self._add(seq, [one.output[-1]], one.position - 1)
                    for seq, one in running.items()}  # fmt: skip
            while waiting and free and self._batch.n_tokens + len(waiting[0][1][0]) <= N_BATCH:
                request, (prompt, num_tokens) = waiting.popleft()
                seq = free.pop()
                running[seq] = Running(request, num_tokens, len(prompt))
                rows[seq] = self._add(seq, prompt, 0)
            self._decode()
            for seq, row in rows.items():
                one = running[seq]
                one.output.append(self._likeliest(row))
                one.position += 1
                one.left -= 1
                if not one.left:
                    outputs[one.request] = one.output
                    del running[seq]
                    llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
                    free.append(seq)
        return outputs

    def stream(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """One request, step by step."""
        ids: list[int] = []
        times = []
        step, position = prompt, 0
        while len(ids) < num_tokens:
            self._batch.n_tokens = 0
            row = self._add(0, step, position)
            self._decode()
            ids.append(self._likeliest(row))
            times.append(time.perf_counter())
            position += len(step)
            step = ids[-1:]
        llama_cpp.llama_memory_seq_rm(self._memory, 0, -1, -1)
        return ids, times

    def _add(self, seq: int, ids: list[int], position: int) -> int:
        """Put tokens of a sequence into the batch; the row that has the logits of the last."""
        batch = self._batch
        first = batch.n_tokens
        for i, token in enumerate(ids):
            row = first + i
            batch.token[row], batch.pos[row] = token, position + i
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, seq, 0
        batch.n_tokens = first + len(ids)
        batch.logits[batch.n_tokens - 1] = 1
        return int(batch.n_tokens) - 1

    def _decode(self) -> None:
        if status := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {status}")

    def _likeliest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp, IMPORT_S)
