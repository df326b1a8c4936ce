"""Values of a configuration file, each read as what it has to be.

Owns the checks of type that every JSON file needs. `name` is the file and the key, as in
"config.json: rope_theta", and stands in every error; what is out of range, a configuration says.
"""

from __future__ import annotations

import re

from cupaged.errors import ConfigError

__all__ = ["flag", "integer", "number", "numbers", "size_in_bytes"]

_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def number(name: str, value: object) -> float:
    """An integer or a real number, as a float; it may be infinite or NaN, which JSON can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(name, value, "a finite number") from None


def numbers(name: str, value: object) -> tuple[float, ...]:
    """A list of numbers."""
    if not isinstance(value, list | tuple):
        raise ConfigError(name, value, "a list of numbers")
    return tuple(number(name, each) for each in value)


def integer(name: str, value: object) -> int:
    """A count: an integer in [1, 2^31)."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ConfigError(name, value, "an integer in [1, 2^31)")
    return value


def flag(name: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(name, value, "true or false")
    return value


def size_in_bytes(text: str) -> int:
    """`1000`, `512MiB`, `2GiB`, `1.5GB`. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)?\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])
