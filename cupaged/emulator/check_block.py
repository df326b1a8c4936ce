"""Check blocks: Python in a comment of a `.cu` file that runs its kernels and states the result.

    /* check -DDTYPE=f32
    x = normal(1000)
    out = empty(1000)
    scale((4,), (256,), (out, x, np.int32(1000)))
    expect(out, 2 * x)
    */

What doctests are for a function, these are for a kernel. Owns the form: finding the blocks of a
file and writing a first one. It runs nothing: check_runner.py does. The code of a block has the
rights of whoever runs it, as a test has.
"""

from __future__ import annotations

import keyword
import re
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cupaged.emulator.errors import EmulatorError
from cupaged.emulator.module import EmulatedFunction

__all__ = ["CheckBlock", "CheckBlockError", "parse_blocks", "suggested_block"]

# A line that holds nothing else opens a block; prose that starts with "check" does not.
_BLOCK = re.compile(
    r"^[ \t]*/\*[ \t]*check(?P<options>(?:[ \t]+-(?:(?!\*/)[^\n])*)?)[ \t]*\n(?P<code>.*?)\*/",
    re.MULTILINE | re.DOTALL,
)

_SIZE = 1000  # of arrays in a first block
_FLOATS = {
    "float64": ", dtype=np.float64", "float32": "", "float16": ", dtype=f16",
    "bfloat16": ", dtype=bf16",
}  # fmt: skip
_NUMPY_NAMES = {"bool": "bool_", "bytes": "uint8"}


class CheckBlockError(EmulatorError):
    """A check block whose first line cannot be read. file, line: where."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path.name}:{line}: {problem}")
        self.file = str(path)
        self.line = line


@dataclass(frozen=True, slots=True)
class CheckBlock:
    """One block of a file.

    number: 1 for the first. line: of its opening. defines, include_dirs, name_expressions: of its
    first line; folders are absolute. code: the Python, at column 0; its first line is line + 1.
    """

    path: Path
    number: int
    line: int
    defines: Mapping[str, str]
    include_dirs: tuple[Path, ...]
    name_expressions: tuple[str, ...]
    code: str

    def mentions(self, kernel: str) -> bool:
        """Whether a word of the code is this one."""
        return re.search(rf"\b{re.escape(kernel)}\b", self.code) is not None


def parse_blocks(path: Path) -> list[CheckBlock]:
    """The check blocks of a file, in its order.

    Raises:
        CheckBlockError: a first line with an unknown option.
        OSError, UnicodeDecodeError: the file cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    blocks = []
    for number, match in enumerate(_BLOCK.finditer(text), start=1):
        line = text.count("\n", 0, match.start("options")) + 1
        defines, folders, names = _options(path, line, match["options"])
        code = textwrap.dedent(match["code"])
        blocks.append(CheckBlock(path, number, line, defines, folders, names, code))
    return blocks


def _options(
    path: Path, line: int, text: str
) -> tuple[dict[str, str], tuple[Path, ...], tuple[str, ...]]:
    """Defines, folders of headers and name expressions of a block's first line."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CheckBlockError(path, line, f"{text.strip()}: {error}") from None
    defines: dict[str, str] = {}
    folders, names = [], []
    position = 0
    while position < len(words):
        word = words[position]
        option, value = (word, "") if word.startswith("--") else (word[:2], word[2:])
        if option not in ("-D", "-I", "--name"):
            problem = f"{word!r} is no option of a check block: it takes -D, -I and --name"
            raise CheckBlockError(path, line, problem)
        if not value:
            position += 1
            if position == len(words):
                raise CheckBlockError(path, line, f"{word} needs a value")
            value = words[position]
        position += 1
        if option == "-D":
            name, _, content = value.partition("=")
            defines[name] = content if "=" in value else "1"
        elif option == "-I":
            folders.append((path.parent / value).absolute())
        else:
            names.append(value)
    return defines, tuple(folders), tuple(names)


def suggested_block(kernel: EmulatedFunction, defines: Mapping[str, str]) -> str:
    """A check block for a kernel; it fails until it says what is right.

    Sizes are guesses.
    """
    threads = min(256, kernel.max_threads_per_block)
    lines = ["/* check" + "".join(f" -D{name}={value}" for name, value in defines.items())]
    arguments, outputs = [], []
    for parameter in kernel.parameters:
        dtype = _NUMPY_NAMES.get(parameter.type_name, parameter.type_name)
        integer = dtype not in _FLOATS
        if not parameter.is_pointer:
            arguments.append(f"np.{dtype}({_SIZE if integer else 1.0})")
            continue
        name = f"{parameter.name}_" if keyword.iskeyword(parameter.name) else parameter.name
        arguments.append(name)
        option = f", dtype=np.{dtype}" if integer else _FLOATS[dtype]
        if not parameter.is_const:
            outputs.append(name)
            lines.append(f"{name} = empty({_SIZE}{option})")
        elif integer:
            lines.append(f"{name} = integers(0, {_SIZE}, {_SIZE}{option})")
        else:
            lines.append(f"{name} = normal({_SIZE}{option})")
    given = ", ".join(arguments) + "," * (len(arguments) == 1)
    lines.append(f"{kernel.name}(({-(-_SIZE // threads)},), ({threads},), ({given}))")
    lines += [f"expect({name}, 0.0)  # 0.0: what NumPy says it should be" for name in outputs]
    return "\n".join([*lines, "*/"])
