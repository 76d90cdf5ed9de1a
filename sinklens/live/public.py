"""The address at which a browser reaches the lab through a reverse proxy, such as JupyterHub's /user/NAME/proxy/PORT/.

The lab's pages use relative addresses, so they work below any path. What the lab must know is the name that requests
come with, because it refuses those for other names (DNS rebinding) and from other origins.

Pitfall: a browser treats all pages of one host as one site. Where a hub serves several users from one host, a page of
another user counts as a page of the lab's own origin.
"""

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from sinklens.errors import SettingError

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class PublicUrl:
    """A public address.

    Attributes:
        origin: scheme, host and port, as a browser's Origin header has them.
        host: host and port, as its Host header has them.
        prefix: path of the page, which ends with a slash.
    """

    origin: str
    host: str
    prefix: str

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"{self.origin}{self.prefix}"

    @property
    def encrypted(self) -> bool:
        """Whether the browser's connection is encrypted."""
        return self.origin.startswith("https:")


def read_public(url: str | None, port: int) -> PublicUrl | None:
    """A public address; None if none was given.

    Args:
        url: the address; ``{port}`` stands for the lab's port.
        port: the lab's port.

    Raises:
        SettingError: it is not an http or https address, or has more than a host, a port and a path.
    """
    if url is None:
        return None
    try:
        parts = urlsplit(url.replace("{port}", str(port)))
        host, given = parts.hostname, parts.port
    except ValueError as error:
        raise SettingError(f"the public URL {url!r:.200} is not an address: {error}.") from error
    plain = parts.path.isascii() and not any(character in parts.path for character in "?#%{}\"'<>\\ ")
    if parts.scheme not in PORTS or not host or "@" in parts.netloc or parts.query or parts.fragment or not plain:
        raise SettingError(
            f"the public URL must be http:// or https://, a host, and perhaps a port and a path, such as "
            f"https://hub.example.org/user/ann/proxy/{{port}}/; got {url!r:.200}."
        )
    name = f"[{host}]" if ":" in host else host
    shown = name if given in (None, PORTS[parts.scheme]) else f"{name}:{given}"
    return PublicUrl(f"{parts.scheme}://{shown}", shown, f"{parts.path.rstrip('/')}/")


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
