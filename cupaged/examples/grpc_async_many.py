"""A hundred prompts, sixteen at a time, over one connection.

The server would take them all at once and batch them; the bound keeps its queue short for others.
A full queue is no failure: the client waits for as long as the server asks, and tries again.

Start a server with `cupaged serve`, then run
`python -m cupaged.examples.grpc_async_many [ADDRESS]`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter

from cupaged.client import AsyncClient, ClientError, Generation

NUM_PROMPTS = 100
MOST_AT_ONCE = 16


async def run(address: str) -> int:
    """Generate, count, print; the exit code."""
    at_once = asyncio.Semaphore(MOST_AT_ONCE)
    failures: Counter[str] = Counter()

    async with AsyncClient(address, retries=5, timeout=120) as client:

        async def one(number: int) -> Generation | None:
            async with at_once:
                try:
                    return await client.generate(
                        f"The number {number} is", temperature=0.8, seed=number, max_tokens=16
                    )
                except ClientError as error:
                    failures[str(error)] += 1
                    return None

        started = time.perf_counter()
        answers = await asyncio.gather(*(one(number) for number in range(NUM_PROMPTS)))
        seconds = time.perf_counter() - started

    good = [answer for answer in answers if answer is not None]
    num_tokens = sum(answer.usage.completion_tokens for answer in good)
    print(f"{len(good)} answers, {num_tokens} tokens, {num_tokens / seconds:.0f} tokens/s")
    for message, number in failures.most_common():
        print(f"{number} failed: {message}", file=sys.stderr)
    return 1 if failures else 0


def main() -> int:
    """Run the loop."""
    return asyncio.run(run(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))


if __name__ == "__main__":
    sys.exit(main())
