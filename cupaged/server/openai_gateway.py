"""The SMG gateway as a child: an OpenAI API over HTTP in front of `vllm.grpc.engine`.

It is a program of others, in whatever environment has it, and reaches the server as any client
does. It is started when the server takes requests, and ends with it; its own end, or that nobody
has installed it, is logged and changes nothing else.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cupaged.server.child_signals import end_with_parent
from cupaged.server.ports import hold_port
from cupaged.server.settings import ServeSettings

PROGRAM = "smg"
_END_SECONDS = 2.0  # for what it still has to write
_MISSING = (
    "It is made by the gateway smg, which is not installed: `pip install smg`, here or in an "
    "environment whose bin folder is on the PATH; or start it anywhere, as"
)
_logger = logging.getLogger(__name__)


class OpenAIGateway:
    """At most one process of the gateway.

    Args:
        settings: with `openai`.

    Raises:
        ConfigError: its port is in use.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._port = _free_port(settings.host, settings.openai_port, "--openai-port")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What clients of the API take as its base."""
        return f"http://{_address(self._settings.host, self._port)}/v1"

    def start(self, port: int) -> None:
        """Start it, if it is installed.

        Args:
            port: of this server's gRPC.
        """
        arguments = self._arguments(port)
        shown = shlex.join([PROGRAM, *arguments])
        program = find_program()
        if program is None:
            _logger.error("--openai: there is no OpenAI API. %s: %s", _MISSING, shown)
            return
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the one line on standard output is ours
                process_group=0,  # Ctrl-C at a terminal is for the supervisor alone
            )
        except OSError as error:
            _logger.error("--openai: the gateway cannot be started: %s", error)
            return
        _logger.info("an OpenAI API is about to be at %s: %s", self.url, shown)

    def look(self) -> None:
        """Say so, once, if it has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            _logger.error(
                "the OpenAI API is gone: the gateway has ended with exit code %d; all else goes on",
                code,
            )

    def close(self) -> None:
        """End it, by force if it takes long."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _arguments(self, port: int) -> list[str]:
        settings = self._settings
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(
            settings.host.strip("[]"), settings.host
        )
        numbers_port = _free_port("127.0.0.1", 0, "--openai")  # it insists on having one
        level = {"warning": "warn", "info": "warn"}.get(settings.log_level, settings.log_level)
        return [
            "launch",
            "--worker-urls", f"grpc://{_address(host, port)}",
            "--host", settings.host.strip("[]"),
            "--port", str(self._port),
            "--prometheus-host", "127.0.0.1",
            "--prometheus-port", str(numbers_port),
            "--log-level", level,
            *(["--log-json"] if settings.log_format == "json" else []),
        ]  # fmt: skip


def find_program() -> str | None:
    """Where the gateway is: in this environment, else on the PATH."""
    here = os.fspath(Path(sys.executable).parent)
    return shutil.which(PROGRAM, path=os.pathsep.join([here, os.environ.get("PATH", "")]))


def _free_port(host: str, port: int, flag: str) -> int:
    """The port's number if it is free, and not held, since the gateway has to take it."""
    held = hold_port(host, port, flag)
    held.close()
    return held.port


def _address(host: str, port: int) -> str:
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def main(parent: int, command: list[str]) -> None:
    """Become a program that the system kills when its parent has died, however that was."""
    end_with_parent()
    if os.getppid() == parent:  # else it died before
        os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
