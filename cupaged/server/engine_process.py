"""The engine's process: `python -m cupaged.server.engine_process FD`.

FD is the control channel. The process loads the model, tells the supervisor, and serves front ends
until it is told to stop. What it dies of it says on the channel first, if it can.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from cupaged._version import __version__
from cupaged.engine_args import BuiltCore, EngineArgs
from cupaged.server import log_setup
from cupaged.server.child_signals import stay
from cupaged.server.child_start import ChildStart, run_child
from cupaged.server.control import ControlChannel, ControlClosed, OrphanWatch
from cupaged.server.engine_loop import EngineLoop
from cupaged.server.engine_observer import EngineObserver, NoObserver, Observer
from cupaged.server.null_runner import make_null_runner
from cupaged.server.settings import ServeSettings
from cupaged.server.stats_line import StatsLine
from cupaged.server.wire import Message, error_to_wire
from cupaged.server.wire_forms import EngineInfo

_BACKLOG = 128
_logger = logging.getLogger(__name__)


def main(fd: int) -> int:
    """Run the process; the exit code."""
    return run_child(fd, _run)


def build(settings: ServeSettings) -> tuple[BuiltCore, EngineInfo]:
    """The core that the settings describe, and what front ends are told of it.

    Raises:
        CupagedError: the model cannot be loaded, or an option of the engine is refused.
    """
    began = time.perf_counter()
    args = EngineArgs.from_options({"model": settings.model, **settings.engine})
    if settings.runner == "null":
        make_runner = partial(make_null_runner, steps_per_s=settings.null_steps_per_s)
        built = args.build_core_without_weights(make_runner)
    else:
        built = args.build_core()
    device = built.device
    info = EngineInfo(
        version=__version__,
        model=settings.model or settings.model_names[0],
        model_path=str(built.files.path),
        architecture=built.files.config.architecture,
        num_parameters=built.files.num_parameters,
        config=built.core.config,
        eos_token_ids=built.files.eos_token_ids,
        generation_defaults=args.generation_defaults(built.files),
        has_priorities=built.core.has_priorities,
        seed=args.seed,
        device="none" if device is None else device.name,
        device_description="nothing is computed" if device is None else device.description,
        dtype="none" if device is None else device.dtype,
        runner=settings.runner,
        pid=os.getpid(),
    )
    return built, replace(info, load_seconds=time.perf_counter() - began)


def _run(start: ChildStart, control: ControlChannel) -> int:
    try:
        with OrphanWatch(control):
            built, info = build(start.settings)
            observer = _observer(start, built)
            listener = _listen(start.engine_socket)
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection needs to look at it again
        loop = EngineLoop(
            built.core, info, listener, control=control, on_control=_obey, observer=observer
        )
        control.send("loaded", info.to_wire(), info.load_seconds)
        loop.run()
        return 0
    except ControlClosed:
        raise
    except Exception as error:
        _logger.debug("the engine ends", exc_info=True)
        form = error_to_wire(error)
        control.send("dying", form["message"], form)
        return 1


def _obey(message: Message) -> bool:
    """What the supervisor says; true for the end."""
    if message[0] == "log_level":
        log_setup.set_level(message[1])
    elif message[0] == "draining":
        stay()
    return bool(message[0] == "stop")


def _observer(start: ChildStart, built: BuiltCore) -> Observer:
    settings = start.settings
    if start.metrics_folder is None:
        return NoObserver()
    from cupaged.server import metrics  # decides where it stores when it is imported

    metrics.store_in(start.metrics_folder, start.name)
    config = built.core.config
    made = metrics.EngineMetrics(
        settings.model_names[0], block_size=config.block_size, num_blocks=config.num_blocks
    )
    return EngineObserver(made, None if settings.disable_log_stats else StatsLine())


def _listen(path: str) -> socket.socket:
    """A socket at the path, where a predecessor may have left its own."""
    listener = socket.socket(socket.AF_UNIX)
    Path(path).unlink(missing_ok=True)
    listener.bind(path)
    listener.listen(_BACKLOG)
    return listener


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
