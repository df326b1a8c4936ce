"""`cupaged pull`: bring a model from the hub into the local cache."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupaged.loading.hub import PullPlan


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "pull",
        help="download a model",
        description="Download what a model on the hub consists of, and print where it lies. "
        "Whatever is in the cache already, even half a file, is not downloaded again.",
        example="cupaged pull HuggingFaceTB/SmolLM2-135M-Instruct",
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="owner/name, owner/name@revision, or owner/name:Q4_K_M for a GGUF file",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print only where it lies")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens to stderr")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Download and print the path, on the last line of standard output."""
    from cupaged.loading.hub import pull

    on_plan = None if args.quiet else _print_plan
    print(pull(args.name, progress=not args.quiet, on_plan=on_plan))
    return 0


def _print_plan(plan: PullPlan) -> None:
    from cupaged.loading.hub_files import shown_size

    print(f"{plan.name} is commit {plan.commit[:12]}:")
    width = max(len(file.name) for file in plan.files)
    for file in plan.files:
        here = "" if file in plan.missing else "  (here already)"
        print(f"  {file.name:{width}}  {shown_size(file.size_bytes):>10}{here}")
    if plan.missing:
        size = shown_size(plan.missing_bytes)
        print(f"to download: {size} of {len(plan.missing)} files", flush=True)
    else:
        print("nothing to download")
