"""The .proto files of every service: what they define, found by name.

Only text is read here; what programs load is `descriptor_set`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SERVER = Path(__file__).resolve().parent
# A definition at the top of a file: its comment, its first line, all up to the closing brace.
_DEFINITION = re.compile(
    r"(?:^//[^\n]*\n)*^(?:message|enum|service) (\w+) \{(?:\}|.*?^\})\n", re.DOTALL | re.MULTILINE
)
_RPC = re.compile(r"^  rpc (\w+)\(((?:stream )?\w+)\) returns \(((?:stream )?\w+)\)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ProtoFile:
    """One .proto file.

    Args:
        name: as others import it, such as "cupaged/v1/model.proto".
        text: all of it.
    """

    name: str
    text: str

    @property
    def package(self) -> str:
        """Such as "cupaged.v1"."""
        return self.text.partition("\npackage ")[2].partition(";")[0]

    def definitions(self) -> dict[str, str]:
        """Services, messages and enums, with their comments, by their full names."""
        found = _DEFINITION.finditer(self.text)
        return {f"{self.package}.{match[1]}": match[0] for match in found}

    def services(self) -> dict[str, list[tuple[str, str, str]]]:
        """The services by their full names: each RPC's name, request and response."""
        rpcs = {name: _RPC.findall(text) for name, text in self.definitions().items()}
        return {name: found for name, found in rpcs.items() if found}


def all_files() -> list[ProtoFile]:
    """Those of `cupaged.v1`, then those of other servers' services."""
    return [*_read(_SERVER / "proto", "cupaged/v1/*.proto"), *_read(_SERVER / "compat", "*.proto")]


def _read(root: Path, pattern: str) -> Iterator[ProtoFile]:
    for path in sorted(root.glob(pattern)):
        yield ProtoFile(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
