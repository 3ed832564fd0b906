"""Find the ports on which processes listen to other hosts."""

from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address

import psutil


def open_to_others(processes: Iterable[psutil.Process]) -> list[tuple[str, int]]:
    """Return name and port of each TCP listener that is not bound to a loopback address."""
    return [
        (process.name(), connection.laddr.port)
        for process in processes
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and not is_loopback(connection.laddr.ip)
    ]


def is_loopback(host: str) -> bool:
    address = ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
