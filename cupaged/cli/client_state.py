"""`cupaged client health` and `cupaged client load`: how a server is, once or again and again."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cupaged.cli.client import FAILURE
from cupaged.cli.records import json_line

if TYPE_CHECKING:
    from cupaged.client import Client, Load

_PROBE_TIMEOUT_S = 5.0
_POLL_S = 1.0
UNREACHABLE = "UNREACHABLE"


def health(args: argparse.Namespace, client: Client) -> int:
    """Print the status; 0 if it is SERVING."""
    if args.watch:
        for status in _changes(args, client):
            print(f"{time.strftime('%H:%M:%S')} {status}", flush=True)
    status = client.health(args.service, timeout=args.timeout or _PROBE_TIMEOUT_S)
    print(status)
    return 0 if status == "SERVING" else FAILURE


def _changes(args: argparse.Namespace, client: Client) -> Iterator[str]:
    """The status whenever it changes, for ever; a server that has gone is waited for."""
    from cupaged.client.errors import RequestCancelledError, UnavailableError

    last = ""
    while True:
        try:
            with client.watch_health(args.service) as statuses:
                for status in statuses:
                    if status != last:
                        last = status
                        yield status
        except (UnavailableError, RequestCancelledError):
            if last != UNREACHABLE:
                last = UNREACHABLE
                yield UNREACHABLE
        time.sleep(_POLL_S)


def load(args: argparse.Namespace, client: Client) -> int:
    """Print what the engine does, as a table or as JSON."""
    if not args.watch:
        show(client.load(args.model, timeout=args.timeout or _PROBE_TIMEOUT_S), args.json)
        return 0
    lines_above = 0
    with client.watch_load(args.model, interval_s=args.interval) as loads:
        for snapshot in loads:
            if lines_above and sys.stdout.isatty():
                sys.stdout.write(f"\x1b[{lines_above}F\x1b[J")
            elif lines_above and not args.json:
                sys.stdout.write("\n")
            lines_above = show(snapshot, args.json)
            sys.stdout.flush()
    return 0


def show(snapshot: Load, as_json: bool) -> int:
    """Print a snapshot; how many lines that took."""
    if as_json:
        sys.stdout.write(json_line(load_record(snapshot)))
        return 0
    lines = table(snapshot)
    print("\n".join(lines))
    return len(lines)


def load_record(snapshot: Load) -> dict[str, Any]:
    """A snapshot as JSON."""
    stamp = snapshot.snapshot_time
    return {**asdict(snapshot), "snapshot_time": None if stamp is None else stamp.isoformat()}


def table(snapshot: Load) -> list[str]:
    """A snapshot as lines of at most 80 characters."""
    limits = [
        f"{limit:,} {what}"
        for limit, what in (
            (snapshot.max_num_queued_reqs, "requests"),
            (snapshot.max_num_queued_tokens, "tokens"),
        )
        if limit is not None
    ]
    ends = ", ".join(f"{number:,} {why}" for why, number in sorted(snapshot.finished_total.items()))
    why = f" ({snapshot.state_reason})" if snapshot.state_reason else ""
    rows = {
        "state": f"{snapshot.state}{why}",
        "running": f"{snapshot.num_running:,} of {snapshot.max_num_seqs:,} sequences",
        "waiting": f"{snapshot.num_waiting:,} sequences, {snapshot.num_preempted:,} of them "
        f"preempted; {snapshot.num_queued_tokens:,} tokens",
        "queue": f"at most {' and '.join(limits)}" if limits else "without a limit",
        "KV blocks": f"{snapshot.num_used_kv_blocks:,} of {snapshot.num_kv_blocks:,} "
        f"({snapshot.kv_cache_usage:.1%}), {snapshot.num_shared_kv_blocks:,} shared",
        "prompts": f"{snapshot.prompt_tokens_per_second:,.1f} tokens/s, "
        f"{snapshot.prompt_tokens_total:,} in all",
        "answers": f"{snapshot.generation_tokens_per_second:,.1f} tokens/s, "
        f"{snapshot.generation_tokens_total:,} in all",
        "finished": ends or "none",
        "engine": f"{snapshot.steps_total:,} steps, {snapshot.preemptions_total:,} preemptions, "
        f"{snapshot.engine_restarts_total:,} restarts",
    }
    return [f"{name:10} {value}"[:80] for name, value in rows.items()]
