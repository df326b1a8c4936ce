"""`cupaged kernel`: check, list and measure CUDA kernels on a machine without a GPU."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import Any

from cupaged.cli.parser import Parser

_MAX_COLUMNS = 100
_FILE_OR_NAME = "a .cu file, or the name of a kernel or a file that `cupaged kernel list` shows"


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "kernel",
        help="check CUDA kernels without a GPU",
        usage="cupaged kernel COMMAND [options]",
        description="Runs CUDA kernels on this machine's processor under checks, lists those of "
        "cupaged, and tells what they take of a GPU. cuda/README.md is a tutorial.",
        example="cupaged kernel check softmax.cu --watch",
    )
    parser.set_defaults(run=lambda args: _without_command(parser))
    commands = parser.add_subparsers(
        title="commands", metavar=f"{'COMMAND':14}", dest="kernel_verb", prog="cupaged kernel"
    )
    _add_check(commands)
    _add_list(commands)
    _add_resources(commands)


def _without_command(parser: Parser) -> int:
    parser.error("a command is missing")


def _add_check(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="run a file's check blocks",
        usage="cupaged kernel check FILE_OR_NAME [--watch] [--seed N] [options]",
        description="Runs the check blocks of a .cu file on an emulated GPU that stops at the "
        "first fault (an index out of bounds, a race, a barrier that not all threads reach, "
        "...), and compiles the file for sm_90 where NVRTC is installed. A check block is a "
        "comment `/* check ... */` that holds Python; it runs as you. Without --seed each block "
        "runs three times: threads in ascending order, then in two random orders. The exit code "
        "is 1 if something fails.",
        example="cupaged kernel check norm --opt-level 2",
    )
    parser.add_argument("name", metavar="FILE_OR_NAME", help=_FILE_OR_NAME)
    parser.add_argument("--watch", action="store_true", help="again whenever a source changes")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="one run, order and random values drawn from N"
    )
    parser.add_argument(
        "-D", dest="defines", action="append", default=[], metavar="NAME=VALUE",
        help="a macro, in place of the block's own",
    )  # fmt: skip
    parser.add_argument(
        "--races", action="store_true", help="look for races between blocks on global memory too"
    )
    parser.add_argument(
        "--opt-level", type=int, choices=range(4), default=1, metavar="N",
        help="-O of the C++ compiler, 0 to 3 (default: 1)",
    )  # fmt: skip
    parser.add_argument("--plain", action="store_true", help="without the checks: faster")
    parser.add_argument("--gdb", action="store_true", help="in gdb, stopped at the kernel")
    # What gdb runs: one order of threads, in this process.
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=_check)


def _add_list(commands: Any) -> None:
    parser = commands.add_parser(
        "list",
        help="list the kernels of cupaged",
        usage="cupaged kernel list [--all]",
        description="Lists the kernels that come with cupaged: each file with the macros to define "
        "(those with a default in brackets), and its kernels with their parameters.",
        example="cupaged kernel list --all",
    )
    parser.add_argument("--all", action="store_true", help="also the macros of every variant")
    parser.set_defaults(run=_list)


def _add_resources(commands: Any) -> None:
    parser = commands.add_parser(
        "resources",
        help="tell what a kernel takes of a GPU",
        usage="cupaged kernel resources FILE_OR_NAME [--arch NAME ...] [options]",
        description="Compiles for GPUs with NVRTC, without a GPU, and shows registers of a "
        "thread, shared memory of a block, spilled bytes and occupancy; with nvdisasm also how "
        "often the instructions that matter occur. Macros not given are those of the file's "
        "first common variant, or of its first check block.",
        example="cupaged kernel resources rms_norm --arch sm_80 sm_90 --dtype bf16",
    )
    parser.add_argument("name", metavar="FILE_OR_NAME", help=_FILE_OR_NAME)
    parser.add_argument(
        "--arch", nargs="+", action="extend", metavar="NAME",
        help="sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 (default: all)",
    )  # fmt: skip
    parser.add_argument("--dtype", metavar="NAME", help="f32, f16 or bf16; the same as -D DTYPE=")
    parser.add_argument(
        "-D", dest="defines", action="append", default=[], metavar="NAME=VALUE", help="a macro"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of a block (default: its launch bounds, or 256)"
    )
    parser.set_defaults(run=_resources)


def _check(args: argparse.Namespace) -> int:
    from cupaged.cli import kernel_check

    return kernel_check.run(args)


def _resources(args: argparse.Namespace) -> int:
    from cupaged.cli import kernel_resources

    return kernel_resources.run(args)


def _list(args: argparse.Namespace) -> int:
    """Print one aligned table: a line for a file, then one for each of its kernels."""
    from cupaged.cli.kernel_signatures import defines, shown_defines, signatures, variants
    from cupaged.runtime.kernels import kernel_files, kernel_folder

    rows = [("FILE, KERNEL", "DEFINES, PARAMETERS")]
    for file in kernel_files():
        path = kernel_folder() / file
        needed, common = defines(path), variants(path)
        optional = [f"[{name}={value}]" for name, value in needed.optional.items()]
        count = f"{len(common)} common variant{'s' * (len(common) != 1)}"
        rows.append((file, f"{' '.join([*needed.required, *optional])}; {count}"))
        if args.all:
            rows += [("", shown_defines(variant)) for variant in common]
        for kernel in signatures(path):
            rows.append((f"  {kernel.name}", ", ".join(kernel.parameters)))
    print("\n".join(_table(rows)))
    return 0


def _table(rows: list[tuple[str, str]]) -> list[str]:
    """Lines of the rows; the second column is wrapped at the width of the terminal."""
    columns = min(_MAX_COLUMNS, shutil.get_terminal_size().columns)
    margin = max(len(name) for name, _ in rows) + 2
    lines = []
    for name, text in rows:
        wrapped = _wrapped(text, max(30, columns - margin))
        lines += [f"{name if not i else '':{margin}}{part}" for i, part in enumerate(wrapped)]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of a text; a parameter is not broken."""
    whole = text.replace(" ", "\xa0").replace(",\xa0", ", ").replace("\xa0[", " [")
    lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines] or [""]
