"""The addresses at which processes listen."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address

import psutil


def open_sockets(processes: Iterable[psutil.Process]) -> dict[str, bool]:
    """Return whether each TCP or UDP socket on which the processes receive has a loopback address, by description."""
    found = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN or (
                    connection.type == socket.SOCK_DGRAM and not connection.raddr
                ):
                    address = ip_address(connection.laddr.ip.removeprefix("::ffff:"))
                    found[f"{process.name()} at {connection.laddr.ip} port {connection.laddr.port}"] = (
                        address.is_loopback
                    )
    return found


def assert_only_local(processes: Iterable[psutil.Process], *names: str) -> None:
    found = open_sockets(processes)
    assert not (reachable := [one for one, is_local in found.items() if not is_local]), reachable
    assert all(any(address.startswith(name) for address in found) for name in names), found
