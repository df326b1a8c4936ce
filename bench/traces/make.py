"""Makes the summaries in this folder from the traces as they were published.

Of texts only lengths are kept, and of those only what the simulations need. SOURCES.md says where
the files come from.

Run it with `python bench/traces/make.py FOLDER`; FOLDER holds sharegpt_opt_lengths.csv,
alpaca_opt_lengths.csv and mooncake_conversation_trace.jsonl.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import numpy as np

# A trace takes its requests from the head of the file: 900 s at 4 and at 30 requests a second.
NUM_RECORDS = {"sharegpt": 4096, "alpaca": 28672}
HERE = Path(__file__).parent


def make_lengths(source: Path, target: Path, num_records: int) -> None:
    """The first records of a CSV file with the columns input_tokens, output_tokens.

    Stored as `lengths`, uint16 [num_records, 2]: tokens of prompt and answer.
    """
    with source.open(newline="") as file:
        rows = csv.DictReader(file)
        pairs = [
            (int(row["input_tokens"]), int(row["output_tokens"]))
            for _, row in zip(range(num_records), rows, strict=False)
        ]
    lengths = np.minimum(np.array(pairs, np.int64), np.iinfo(np.uint16).max)
    np.savez_compressed(target, lengths=lengths.astype(np.uint16))


def make_blocks(source: Path, target: Path) -> None:
    """Requests of a JSON-lines trace whose prompts are named by blocks of 512 tokens.

    Stored are `lengths`, int32 [n, 2], and `id_steps`: the block ids of all prompts, one after
    another, each less the one before it. Most are 1, which packs well.
    """
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    lengths = np.array([(row["input_length"], row["output_length"]) for row in rows], np.int32)
    ids = np.concatenate([row["hash_ids"] for row in rows])
    np.savez_compressed(target, lengths=lengths, id_steps=np.diff(ids, prepend=0).astype(np.int32))


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, num_records in NUM_RECORDS.items():
        make_lengths(folder / f"{name}_opt_lengths.csv", HERE / f"{name}.npz", num_records)
    make_blocks(folder / "mooncake_conversation_trace.jsonl", HERE / "mooncake.npz")


if __name__ == "__main__":
    main()
