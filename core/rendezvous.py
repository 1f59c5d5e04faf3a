"""Where the members of a link meet: a store that listens on one address, and addresses that reach it."""

from __future__ import annotations

import ipaddress
import secrets
import socket

import torch.distributed as dist
from weightlink.bounded import bounded
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError, TransferError


def new_key() -> str:
    """An unguessable prefix for one epoch's keys. It travels over the authenticated control plane only."""
    return secrets.token_hex(16)


class Rendezvous:
    """A ``TCPStore`` on exactly one address. The store itself authenticates nobody: for trusted networks only.

    ``store`` is this process's own client. The socket is closed once :meth:`close` was called and every channel that
    was opened on ``store`` is closed too.
    """

    def __init__(self, host: str, port: int, store: dist.Store) -> None:
        self.host = host
        self.port = port
        self._store: dist.Store | None = store

    @classmethod
    def listen(cls, host: str, deadline: Deadline) -> Rendezvous:
        """Listens on a free port of ``host``, an address or name of this machine; raises :class:`ConfigError` if it
        is not one, or stands for every address."""
        family, address = _resolve(host)
        if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
            raise ConfigError(
                "the store must listen on one address", expected="an address of one interface", found=host
            )
        # Left to itself the store listens on every address of the machine, so it is handed a socket bound by us.
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            try:
                listener.bind((address, 0))
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {host}: {error.strerror}",
                    expected="an address of this machine",
                    found=address,
                    remedy="pass host= with the address that engines reach this machine by",
                ) from error
            listener.listen(socket.SOMAXCONN)
            port: int = listener.getsockname()[1]
            store = dist.TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=deadline.timedelta("the store to start"),
                master_listen_fd=listener.detach(),
            )
        return cls(address, port, store)

    @property
    def store(self) -> dist.Store:
        if self._store is None:
            raise ConfigError("this rendezvous is closed")
        return self._store

    def close(self) -> None:
        """Lets go of the store. Safe to repeat."""
        self._store = None


def connect(host: str, port: int, deadline: Deadline) -> dist.Store:
    """A client of the store at ``host:port``. Raises :class:`TransferError` when nothing listens there and
    ``DeadlineExceeded`` when it does not answer."""
    where = f"the trainer's store at {host}:{port}"
    timeout = deadline.timedelta(where)
    try:
        # A plain socket first: the store's client tries again and again where nothing listens, and logs all of it.
        socket.create_connection((host, port), timeout=timeout.total_seconds()).close()
        # Bounded: the client's own timeout does not hold for a store that accepts and then says nothing.
        return bounded(
            lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout), deadline
        )
    except (OSError, RuntimeError) as error:
        if deadline.expired or isinstance(error, TimeoutError):
            raise deadline.exceeded(where) from error
        raise TransferError(
            f"cannot reach {where}",
            found=str(error).partition("\n")[0],
            remedy="pass connect(host=...) with an address of trainer rank 0 that engines can reach",
        ) from error


def local_address_towards(host: str, port: int) -> str:
    """This machine's address on the route to ``host``; no packet is sent. Raises :class:`ConfigError` if there is no
    route."""
    family, address = _resolve(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise ConfigError(f"no route to {host}: {error.strerror}", found=address) from error
        found: str = probe.getsockname()[0]
        return found


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"cannot resolve {host!r}: {error.strerror}") from error
    return family, str(address[0])
