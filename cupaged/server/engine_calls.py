"""What a front end may ask of the engine that is no request: by name, answered at once.

Calls run between two steps, so they see the core at rest.
"""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable
from typing import Any

from cupaged.engine.core import EngineCore
from cupaged.errors import CupagedError, EngineError, InvalidParameterError, NotSupportedError
from cupaged.server.wire import error_to_wire
from cupaged.server.wire_forms import stats_to_wire

_PROFILE_LINES = 40


class EngineCalls:
    """The calls of one engine.

    "ping": None. "stats": the fields of `EngineStats`. "audit": None, or an `EngineError` that says
    which invariant is broken. "start_profile", "stop_profile": Python's profiler around the loop;
    the second gives its table as text. "flush_prefix_cache": KV blocks given back.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._profile: cProfile.Profile | None = None
        self._known: dict[str, Callable[[], Any]] = {
            "ping": lambda: None,
            "stats": lambda: stats_to_wire(core.stats()),
            "audit": self._audit,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
            "flush_prefix_cache": self._flush_prefix_cache,
        }

    def answer(self, name: str, args: list[Any]) -> tuple[bool, Any]:
        """Whether it worked, and the value or the error as plain values."""
        try:
            if name not in self._known or args:
                allowed = f"one of {', '.join(self._known)}, without arguments"
                raise InvalidParameterError("call", name, allowed)
            return True, self._known[name]()
        except CupagedError as error:
            return False, error_to_wire(error)

    def _audit(self) -> None:
        try:
            self._core.audit()
        except AssertionError as error:
            raise EngineError(f"the audit failed: {error}") from error

    def _start_profile(self) -> None:
        if self._profile is not None:
            raise InvalidParameterError("start_profile", "running", "stopped before it is started")
        self._profile = cProfile.Profile()
        self._profile.enable()

    def _stop_profile(self) -> str:
        if self._profile is None:
            raise InvalidParameterError(
                "stop_profile", "not running", "started before it is stopped"
            )
        profile, self._profile = self._profile, None
        profile.disable()
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(_PROFILE_LINES)
        return text.getvalue()

    def _flush_prefix_cache(self) -> int:
        if not self._core.config.enable_prefix_caching:
            raise NotSupportedError("flush_prefix_cache: the engine has no prefix cache")
        return self._core.reset_prefix_cache()
