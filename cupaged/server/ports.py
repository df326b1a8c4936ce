"""Addresses to listen at: free or refused by name, and held so that several front ends share one.

gRPC would share a port with whoever else has it, without a word. So a port is tried alone first;
then a socket that never listens holds it, and every front end binds beside it (SO_REUSEPORT).
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupaged.errors import ConfigError

_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class HeldPort:
    """A TCP port that this process holds.

    host: as it was asked for. port: its number, never 0.
    """

    host: str
    port: int
    sockets: tuple[socket.socket, ...]

    @property
    def address(self) -> str:
        """`host:port`, as clients write it."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def close(self) -> None:
        """Give it back; those who listen there go on."""
        for sock in self.sockets:
            sock.close()


def hold_port(host: str, port: int, flag: str) -> HeldPort:
    """Take a port for as long as the server runs.

    Args:
        port: 0 for any free one.
        flag: the option that names the port, for errors.

    Raises:
        ConfigError: the port is in use or not allowed, or the host is none of this machine.
    """
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        raise ConfigError("host", host, "a host name or an address of this machine") from None
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(found):
        address = (address[0], port, *address[2:])
        try:
            if port:
                _bind(family, address, alone=True).close()
            sockets.append(_bind(family, address, alone=False))
            port = sockets[0].getsockname()[1]
        except OSError as error:
            if error.errno in _NOT_OURS:  # a name may have an address of IPv6 where there is none
                missing = error
                continue
            for sock in sockets:
                sock.close()
            raise _refusal(error, host, port, flag) from None
    if missing is not None and not sockets:
        raise _refusal(missing, host, port, flag)
    return HeldPort(host.strip("[]"), port, tuple(sockets))


def check_unix_socket(path: str) -> None:
    """Make way for a unix socket: what a dead server has left there is removed.

    Raises:
        ConfigError: a server answers there, something else lies there, or the folder is none.
    """
    if not os.access(Path(path).absolute().parent, os.W_OK | os.X_OK):
        raise ConfigError("uds", path, "a path in a folder that exists and can be written")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("uds", path, "the path of a socket; another file lies there")
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
        except OSError:
            os.unlink(path)  # nobody listens
            return
    raise ConfigError("uds", path, "a free path: another server listens there")


def _bind(family: socket.AddressFamily | int, address: Any, *, alone: bool) -> socket.socket:
    """alone: refused where anybody else is; else beside others that allow it as we do."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Without SO_REUSEADDR, connections that ended a moment ago would count as somebody.
        option = socket.SO_REUSEADDR if alone else socket.SO_REUSEPORT
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        sock.bind(address)
        if alone:
            sock.listen(1)
    except OSError:
        sock.close()
        raise
    return sock


def _refusal(error: OSError, host: str, port: int, flag: str) -> ConfigError:
    if error.errno in _NOT_OURS:
        return ConfigError("host", host, "an address of this machine")
    if isinstance(error, PermissionError):
        allowed = f"a port that this user may listen at (1024 or more); {flag} gives another one"
        return ConfigError(flag, port, allowed)
    if error.errno != errno.EADDRINUSE:
        return ConfigError(flag, port, f"a port of {host} that can be bound ({error.strerror})")
    allowed = f"a free port of {host}: another program uses it; {flag} gives another one, 0 any"
    return ConfigError(flag, port, allowed)
