"""`cupaged kernel check`: runs the check blocks of a kernel file and tells what came of it.

Owns the printing, the loop of `--watch`, and the compile for a GPU. The blocks themselves are read
and run by cupaged/emulator/check_block.py and check_runner.py.
"""

from __future__ import annotations

import argparse
import linecache
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from cupaged.cli.kernel_signatures import find_kernel, parsed_defines, shown_defines, signatures
from cupaged.emulator.check_block import CheckBlock, CheckBlockError, parse_blocks, suggested_block
from cupaged.emulator.check_runner import BlockRunner, Outcome, RunOptions
from cupaged.emulator.errors import ToolchainError
from cupaged.errors import BadValueError, ConfigError, CupagedError
from cupaged.runtime.cache_folder import source_files
from cupaged.runtime.errors import CompilerUnavailableError, KernelCompileError
from cupaged.runtime.kernels import compile_kernel, kernel_folder, nvrtc_version, toolkit_headers

ORDERS = (None, 1, 2)  # seeds of the runs without --seed; None is the ascending order
_ARCH = "sm_90"
_POLL_SECONDS = 0.2
_MAX_COLUMNS = 100
_COLOURS = {"ok": "32", "note": "33", "failed": "31"}


def run(args: argparse.Namespace) -> int:
    """Check the file once, or whenever it changes; 1 if something failed."""
    _refuse_contradictions(args)
    path, kernel = find_kernel(args.name)
    orders = (args.seed,) if args.seed is not None else ORDERS[:1] if args.in_process else ORDERS
    options = RunOptions(
        defines=parsed_defines(args.defines),
        include_dirs=(kernel_folder(),),
        mode="plain" if args.plain else "checked",
        opt_level=args.opt_level,
        global_races=args.races,
        isolated=not args.in_process,
    )
    if args.gdb:
        _become_gdb(path, kernel, orders, options)
    if not args.watch:
        return _check(path, kernel, orders, options, for_gpu=not args.in_process)
    try:
        _watch(path, kernel, orders, options)
    except KeyboardInterrupt:
        print()
    return 0


def _refuse_contradictions(args: argparse.Namespace) -> None:
    if args.seed is not None and args.seed < 0:
        raise ConfigError("--seed", args.seed, "at least 0")
    if args.plain and args.races:
        raise ConfigError("--races", "--plain", "without --plain, which checks nothing")
    if args.gdb and args.watch:
        raise ConfigError("--gdb", "--watch", "without --watch")


def _check(
    path: Path,
    kernel: str | None,
    orders: Sequence[int | None],
    options: RunOptions,
    *,
    for_gpu: bool = True,
) -> int:
    """Run and compile everything once; the exit code."""
    start = time.monotonic()
    runner = BlockRunner(options)
    try:
        blocks = parse_blocks(path)
    except CheckBlockError as error:
        _fail(path.name, str(error))
        return 1
    if kernel is not None:
        blocks = [block for block in blocks if block.mentions(kernel)]
    if blocks:
        failures = sum(not _run_block(block, runner, orders) for block in blocks)
    else:
        failures = _compile_only(path, runner)
    names = [kernel] if kernel else [signature.name for signature in signatures(path)]
    unchecked = [name for name in names if not any(block.mentions(name) for block in blocks)]
    if unchecked:
        _tell("note", f"no check block runs {', '.join(unchecked)}")
    if for_gpu:
        variants = [(runner.defines(block), block.include_dirs) for block in blocks]
        failures += _compile_for_gpu(path, variants or [(dict(options.defines), ())])
    if not blocks and not failures:
        _show_suggestion(path, kernel, runner)
    seconds = f"{time.monotonic() - start:.1f} s"
    verdict = f"{failures} failed" if failures else "all is well" if blocks else "nothing was run"
    print(f"{verdict}; {_how(blocks, orders, options)}{seconds}", flush=True)
    return int(failures > 0)


def _run_block(block: CheckBlock, runner: BlockRunner, orders: Sequence[int | None]) -> bool:
    """Run one block in every order, up to the first failure; True if there is none."""
    place = f"{block.path.name}:{block.line}"
    defines = shown_defines(runner.defines(block))
    outcomes: list[Outcome] = []
    for seed in orders:
        outcome = runner.run(block, seed)
        outcomes.append(outcome)
        if outcome.failure is not None:
            what = outcome.failure.message
            if seed is not None and len(orders) > 1:
                before = _orders(orders[: len(outcomes) - 1])
                what += f"\nwith threads in the order of --seed {seed}, not in {before}"
            _fail(_joined(place, defines), what)
            return False
    for name in outcomes[0].launches:
        count = sum(outcome.launches.get(name, 0) for outcome in outcomes)
        seconds = sum(outcome.seconds.get(name, 0.0) for outcome in outcomes)
        shown = f"{count} launch{'es' * (count > 1)}, {1000 * seconds:.0f} ms"
        _tell("ok", _joined(place, name, defines, shown))
    if not outcomes[0].num_comparisons:
        _tell("note", f"{place}  expects nothing: only faults would be seen")
    return True


def _compile_only(path: Path, runner: BlockRunner) -> int:
    """Compile a file without blocks for the emulator; how many failed."""
    try:
        runner.module(_no_block(path))
    except ToolchainError:
        raise
    except CupagedError as error:
        _fail(path.name, str(error))
        return 1
    _tell("ok", f"{path.name}  compiles for the emulator")
    return 0


def _show_suggestion(path: Path, kernel: str | None, runner: BlockRunner) -> None:
    module = runner.module(_no_block(path))
    chosen = [k for k in module.kernels if kernel in (None, k.name)]
    if chosen:
        print("\nA check block, at the end of the file, begins like this:\n")
        print(suggested_block(chosen[0], runner.options.defines) + "\n")


def _no_block(path: Path) -> CheckBlock:
    """A block of a file that has none: its options are those of the command line."""
    return CheckBlock(path, 1, 1, {}, (), (), "")


def _compile_for_gpu(
    path: Path, variants: Iterable[tuple[dict[str, str], tuple[Path, ...]]]
) -> int:
    """Compile each variant for sm_90 where NVRTC is installed; how many failed."""
    try:
        version = nvrtc_version()
    except CompilerUnavailableError:
        advice = "pip install 'cupaged[cuda12-jit]'"
        _tell("note", f"no NVRTC installed: GPU compile skipped ({advice})")
        return 0
    failures = 0
    done: list[object] = []
    try:
        toolkit_headers(version[0])
        for defines, folders in variants:
            if (defines, folders) in done:
                continue
            done.append((defines, folders))
            what = _joined(path.name, shown_defines(defines), f"for {_ARCH}")
            try:
                compile_kernel(path, defines, _ARCH, include_dirs=folders)
            except KernelCompileError as error:
                _fail(what, str(error))
                failures += 1
            except BadValueError as error:
                _tell("note", f"GPU compile skipped: {error}")
            else:
                _tell("ok", f"{what}  compiles")
    except CompilerUnavailableError as error:
        _tell("note", f"GPU compile skipped: {error}")
    return failures


def _watch(
    path: Path, kernel: str | None, orders: Sequence[int | None], options: RunOptions
) -> None:
    """Check again after every change of the file or a header, until Ctrl-C."""
    while True:
        columns = min(_MAX_COLUMNS, shutil.get_terminal_size().columns)
        print(f"--- {time.strftime('%H:%M:%S')} {path.name} ".ljust(columns, "-"), flush=True)
        before = _state(path, options.include_dirs)
        linecache.checkcache()  # messages show lines as they are now
        try:
            _check(path, kernel, orders, options)
        except (OSError, UnicodeDecodeError) as error:  # an editor may be in the middle of it
            _fail(path.name, f"cannot be read: {error}")
        while _state(path, options.include_dirs) == before:
            time.sleep(_POLL_SECONDS)


def _state(path: Path, include_dirs: Sequence[Path]) -> object:
    """Changes when a source does."""
    try:
        files = [file for _, file in source_files(path, include_dirs) if file is not None]
        return [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    except OSError as error:
        return error.errno


def _become_gdb(
    path: Path, kernel: str | None, orders: Sequence[int | None], options: RunOptions
) -> None:
    """Run gdb in place of this process, on the same check in one process, unoptimised, unchecked.

    Raises:
        CupagedError: there is no gdb.
    """
    gdb = shutil.which("gdb")
    if gdb is None:
        raise CupagedError("gdb is not on PATH; install it (Debian: apt install gdb)")
    names = [kernel] if kernel else [signature.name for signature in signatures(path)]
    commands = ["set breakpoint pending on", *(f"break {name}" for name in names), "run"]
    defines = [f"-D{name}={value}" for name, value in options.defines.items()]
    seed = [] if orders[0] is None else [f"--seed={orders[0]}"]
    words = [
        gdb, "-q", *(word for text in commands for word in ("-ex", text)), "--args",
        sys.executable, "-m", "cupaged", "kernel", "check", kernel or str(path), "--in-process",
        "--plain", "--opt-level=0", *seed, *defines,
    ]  # fmt: skip
    sys.stdout.flush()
    os.execv(gdb, words)


def _how(blocks: Sequence[CheckBlock], orders: Sequence[int | None], options: RunOptions) -> str:
    """What has been run, for the last line."""
    if not blocks:
        return ""
    count = f"{len(blocks)} check block{'s' * (len(blocks) > 1)}"
    plain = ", without checks" if options.mode == "plain" else ""
    return f"{count}, threads in {_orders(orders)}{plain}; "


def _orders(seeds: Sequence[int | None]) -> str:
    """Orders of threads in words."""
    drawn = [str(seed) for seed in seeds if seed is not None]
    words = ["ascending order"] if None in seeds else []
    if drawn:
        words.append(f"the order{'s' * (len(drawn) > 1)} of --seed {' and '.join(drawn)}")
    return " and in ".join(words)


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _fail(what: str, message: str) -> None:
    _tell("failed", what)
    print(textwrap.indent(message, "  "), flush=True)


def _tell(verdict: str, text: str) -> None:
    """One line, with a coloured verdict on a terminal."""
    shown = f"{verdict:8}"
    wants_colours = "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"
    if sys.stdout.isatty() and wants_colours:
        shown = f"\x1b[{_COLOURS[verdict]}m{shown}\x1b[0m"
    print(shown + text, flush=True)
