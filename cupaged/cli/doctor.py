"""`cupaged doctor`, also `collect-env`: what there is, whether it will do, what to do if not."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from cupaged._version import __version__
from cupaged.cli.checks import (
    Finding,
    check_devices,
    check_kernels,
    check_machine,
    check_products,
    check_python,
)

_NAME_COLUMNS = 24
_VERDICT_COLUMNS = 9
_MAX_COLUMNS = 100
_COLOURS = {"ok": "32", "note": "33", "problem": "31"}


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "doctor",
        help="look at this machine and say what is missing",
        usage="cupaged doctor [--offline] [--json]",
        description="Shows versions, machine, GPU, compilers, models and the hub, each with a "
        "verdict (ok, note or problem) and what to do about it; good to have in a bug report. "
        "It shows no access tokens and no passwords. The exit code is 1 if something that the "
        "cpu device needs is broken.",
        example="cupaged doctor --offline",
    )
    parser.add_argument("--offline", action="store_true", help="do not ask the hub")
    parser.add_argument("--json", action="store_true", help="print one object of JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the checks and print the findings."""
    findings = []
    show = _printer() if not args.json else (lambda finding: None)
    for finding in _findings(offline=args.offline):
        findings.append(finding)
        show(finding)
    problems = sum(finding.verdict == "problem" for finding in findings)
    if args.json:
        rows = [asdict(finding) for finding in findings]
        print(json.dumps({"cupaged": __version__, "ok": not problems, "findings": rows}, indent=1))
    elif problems:
        print(f"\n{problems} problem{'s' if problems > 1 else ''}: cupaged will not run like this")
    else:
        print("\nno problem: cupaged can run on cpu")
    return int(problems > 0)


def _findings(*, offline: bool) -> Iterator[Finding]:
    from cupaged.cli import surroundings

    yield from _safely("Python", check_python)
    yield from _safely("machine", check_machine)
    yield from _safely("native kernels", check_kernels)
    yield from _safely("BLAS", check_products)
    yield from _safely("devices", check_devices)
    yield from _safely("GPU", surroundings.check_gpu)
    yield from _safely("C++ compiler", surroundings.check_compiler)
    yield from _safely("default model", surroundings.check_models)
    yield from _safely("hub", lambda: surroundings.check_hub(offline=offline))


def _safely(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """A check that breaks is a finding, too; what it needs has been named by another one."""
    try:
        yield from check()
    except Exception as error:
        yield Finding(name, f"cannot be looked at: {type(error).__name__}: {error}", "note")


def _printer() -> Callable[[Finding], None]:
    """One finding after another, within the width of the terminal."""
    columns = min(_MAX_COLUMNS, shutil.get_terminal_size().columns)
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    margin = " " * (_VERDICT_COLUMNS + _NAME_COLUMNS)

    def show(finding: Finding) -> None:
        verdict = f"{finding.verdict:{_VERDICT_COLUMNS}}"
        if coloured:
            verdict = f"\x1b[{_COLOURS[finding.verdict]}m{verdict}\x1b[0m"
        lines = textwrap.wrap(finding.value, columns - len(margin)) or [""]
        if finding.advice:
            lines += textwrap.wrap(f"-> {finding.advice}", columns - len(margin))
        print(f"{verdict}{finding.name:{_NAME_COLUMNS}}" + f"\n{margin}".join(lines), flush=True)

    return show
