"""What a planted defect is: one text of one file of the package, replaced."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Plant:
    """`old` occurs exactly once in `file` and is replaced by `new`."""

    name: str
    file: str
    old: str
    new: str

    def apply(self, package: Path) -> None:
        """Change the copy of the package in folder `package`."""
        path = package / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {text.count(self.old)} times")
        path.write_text(text.replace(self.old, self.new))
