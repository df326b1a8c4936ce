"""Values of a configuration file, each read as what it has to be.

Owns the checks of type that every JSON file needs. `name` is the file and the key, as in
"config.json: rope_theta", and stands in every error; what is out of range, a configuration says.
"""

from __future__ import annotations

from cupaged.errors import ConfigError

__all__ = ["flag", "integer", "number", "numbers"]


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
