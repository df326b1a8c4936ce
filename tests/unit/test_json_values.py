"""Values of JSON files: what each reader takes, and that its errors name file and key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from cupaged.errors import ConfigError
from cupaged.json_values import flag, integer, number, numbers

HUGE = 10**400


@pytest.mark.parametrize(
    ("read", "value", "expected"),
    [
        (number, 3, 3.0),
        (number, -0.5, -0.5),
        (number, math.inf, math.inf),
        (numbers, [], ()),
        (numbers, [1, 2.5], (1.0, 2.5)),
        (integer, 1, 1),
        (integer, 2**31 - 1, 2**31 - 1),
        (flag, False, False),
    ],
)
def test_what_is_taken(read: Callable[[str, Any], Any], value: Any, expected: Any) -> None:
    found = read("x", value)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("read", "values"),
    [
        (number, [None, True, "1", [1], HUGE]),
        (numbers, [None, 1.0, "12", {}, [None], [True], [HUGE]]),
        (integer, [None, True, 0, -1, 2**31, HUGE, 1.0, "1"]),
        (flag, [None, 0, 1, "true"]),
    ],
)
def test_what_is_refused(read: Callable[[str, Any], Any], values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=r"^a\.json: key must be ") as refused:
            read("a.json: key", value)
        assert refused.value.name == "a.json: key"
