"""Which addresses only this machine reaches."""

import ipaddress


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """`host` as an address; None if it is a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_local(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    address = ip_address(host)
    return host == "localhost" if address is None else address.is_loopback
