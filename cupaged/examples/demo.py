"""Eight prompts at once through a KV pool that is too small for them, shown live.

Two prompts want two samples, so blocks are shared; the pool runs out, so sequences are preempted
and computed again; one request is aborted half-way. At the end the pool is empty, and every prompt
is run again alone: the answers must be the same.

Run it with `python -m cupaged.examples.demo`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field, replace
from statistics import mean, median

from cupaged import LLM, RequestOutput, SamplingParams
from cupaged.examples.live_display import Row, make_display, print_next

NUM_BLOCKS = 20
MAX_MODEL_LEN = 256
SYSTEM = "Answer in one short sentence."
QUESTIONS = (
    ("What is the capital of France?", 1),
    ("Name a colour of the rainbow.", 2),
    ("Why is the sky blue?", 1),
    ("What does a baker do?", 1),
    ("Suggest a name for a cat.", 2),
    ("What is water made of?", 1),
    ("Tell me a long story about a dragon.", 1),
    ("How many legs has a spider?", 1),
)
ABORTED = 6  # the long story is aborted after this many tokens:
ABORT_AFTER_TOKENS = 12
MAX_TOKENS = 24
NEXT = (
    "{bin}cupaged chat",
    '{bin}cupaged generate -p "Once upon a time" --max-tokens 40',
    "make demo-serve",
    "make test",
)


@dataclass(slots=True)
class Measured:
    """What the run together showed, step by step and at its end."""

    seconds: float = 0.0
    utilisation: list[float] = field(default_factory=list)
    most_shared: int = 0
    finished: dict[str, RequestOutput] = field(default_factory=dict)


def params_for(index: int, num_samples: int) -> SamplingParams:
    """Greedy for one sample; seeded draws for two."""
    if num_samples == 1:
        return SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    return SamplingParams(
        n=num_samples, temperature=0.8, top_p=0.9, seed=index, max_tokens=MAX_TOKENS
    )


def run_together(llm: LLM, prompts: list[dict[str, object]]) -> Measured:
    """All prompts at once, with the display."""
    measured = Measured()
    display = make_display(sys.stdout, llm.engine.core.block_manager.ref_counts)
    rows = {}
    for i, (question, n) in enumerate(QUESTIONS):
        for j in range(n):
            rows[i, j] = Row(f"{i + 1}.{j + 1}" if n > 1 else f"{i + 1}", question)
    params = [params_for(i, n) for i, (_, n) in enumerate(QUESTIONS)]
    start = time.perf_counter()
    outputs = llm.stream(prompts, params)
    first_id: int | None = None
    num_tokens = {key: 0 for key in rows}
    with display:
        for output in outputs:
            if first_id is None:
                first_id = int(output.request_id)
            index = int(output.request_id) - first_id
            for sample in output.outputs:
                row = rows[index, sample.index]
                row.text, row.state = sample.text, sample.finish_reason or "running"
                num_tokens[index, sample.index] = len(sample.token_ids)
            if output.finished:
                measured.finished[str(index)] = output
            elif index == ABORTED and len(output.outputs[0].token_ids) >= ABORT_AFTER_TOKENS:
                llm.abort(output.request_id)
            stats = llm.get_stats()
            if stats.num_used_blocks:
                measured.utilisation.append(stats.kv_utilisation)
            measured.most_shared = max(measured.most_shared, stats.num_shared_blocks)
            rate = sum(num_tokens.values()) / (time.perf_counter() - start)
            display.update(stats, list(rows.values()), rate)
    measured.seconds = time.perf_counter() - start
    return measured


def print_summary(llm: LLM, measured: Measured) -> None:
    """Requests, tokens, times, memory."""
    outputs = list(measured.finished.values())
    tokens = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    times = [o.metrics.time_to_first_token for o in outputs if o.metrics]
    first = median(t for t in times if t is not None)
    stats = llm.get_stats()
    print(
        f"requests                {len(outputs)} ({sum(len(o.outputs) for o in outputs)} answers)"
    )
    print(f"tokens generated        {tokens}")
    print(f"tokens per second       {tokens / measured.seconds:.1f}")
    print(f"time to first token     {first * 1000:.0f} ms (median)")
    print(f"KV utilisation          {100 * mean(measured.utilisation):.1f} % of the slots in use")
    print(f"blocks shared           at most {measured.most_shared} at a time")
    print(f"preemptions             {stats.num_preemptions_total}")
    print(f"blocks still in use     {stats.num_used_blocks}")


def run_alone(llm: LLM, prompts: list[dict[str, object]], measured: Measured) -> int:
    """Each prompt by itself; returns how many differ from the run together."""
    print("\nalone vs together: each prompt again, one after the other")
    start = time.perf_counter()
    different = 0
    for i, (prompt, (_, n)) in enumerate(zip(prompts, QUESTIONS, strict=True)):
        together = measured.finished[str(i)].outputs
        params = params_for(i, n)
        if i == ABORTED:
            params = replace(params, max_tokens=len(together[0].token_ids))
        alone = llm.generate(prompt, params, use_tqdm=False)[0].outputs
        same = [a.token_ids == b.token_ids for a, b in zip(alone, together, strict=True)]
        different += same.count(False)
        lengths = " and ".join(str(len(sample.token_ids)) for sample in together)
        note = " up to the abort" if i == ABORTED else ""
        print(f"  prompt {i + 1}: {'same' if all(same) else 'DIFFERENT'}, {lengths} tokens{note}")
    seconds = time.perf_counter() - start
    print(
        f"one after the other {seconds:.1f} s, together {measured.seconds:.1f} s: "
        f"{seconds / measured.seconds:.1f} times as fast"
    )
    return different


def main() -> int:
    """Run the demo; exit code 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="default: the installed SmolLM2-135M-Instruct")
    args = parser.parse_args()
    start = time.perf_counter()
    llm = LLM(
        args.model,
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_seqs=16,
        max_num_batched_tokens=256,
    )
    prompts: list[dict[str, object]] = [
        llm.render_chat(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        )
        for question, _ in QUESTIONS
    ]
    print(f"model loaded in {time.perf_counter() - start:.1f} s\n")
    measured = run_together(llm, prompts)
    print_summary(llm, measured)
    different = run_alone(llm, prompts, measured)
    print_next(NEXT)
    return 1 if different else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
