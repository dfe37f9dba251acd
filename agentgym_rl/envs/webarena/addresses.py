"""Where the sites are, and the names under which agents know them.

Tasks name a site by a placeholder such as ``__REDDIT__``, agents by its canonical address (``http://reddit.com``), the
browser by the address of the server that really answers. Nothing but canonical addresses is shown to an agent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from agentgym_rl.errors import ConfigError

CANONICAL: Mapping[str, str] = {
    "SHOPPING": "http://onestopmarket.com",
    "SHOPPING_ADMIN": "http://luma.com/admin",
    "REDDIT": "http://reddit.com",
    "GITLAB": "http://gitlab.com",
    "MAP": "http://openstreetmap.org",
    "WIKIPEDIA": "http://wikipedia.org",
    "HOMEPAGE": "http://homepage.com",
}
"""Environment variable of a site -> its canonical address."""
BLANK = "about:blank"

_PLACEHOLDER = re.compile(r"__([A-Z]+(?:_[A-Z]+)*)__")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/|$)")
_SPELLING = re.compile(r"^https?://(www\.)?", re.IGNORECASE)
"""Ways to begin an address that lead to the same site."""


def addresses_from_environment() -> dict[str, str]:
    """The addresses that environment variables give; raises `ConfigError` for one that is no http address."""
    found = {}
    for name in CANONICAL:
        if address := os.environ.get(name, "").strip():
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.netloc:
                raise ConfigError(f"{name}={address!r}: must be an address such as http://127.0.0.1:7770")
            found[name] = address.rstrip("/")
    return found


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


@dataclass(frozen=True)
class Addresses:
    """The configured sites: name of the environment variable -> address without a final slash."""

    real: Mapping[str, str]

    def filled(self, text: str) -> str:
        """``text`` with real addresses in the place of placeholders; raises KeyError that names a missing site."""
        return _PLACEHOLDER.sub(lambda match: self._real(match), text)

    def _real(self, match: re.Match[str]) -> str:
        return self.real[match[1]] if match[1] in CANONICAL else match[0]

    def missing(self, text: str) -> list[str]:
        """Sites that placeholders of ``text`` name and that have no address."""
        named = dict.fromkeys(_PLACEHOLDER.findall(text))
        return [name for name in named if name in CANONICAL and name not in self.real]

    def contains(self, url: str) -> bool:
        """True when a configured site's server answers at ``url``."""
        try:
            return _origin(url) in {_origin(address) for address in self.real.values()}
        except ValueError:  # such as an unclosed bracket in the host
            return False

    def canonical(self, text: str) -> str:
        """``text`` with canonical addresses in the place of real ones."""
        for real, canonical in self._entrances():
            text = re.sub(re.escape(real) + r"(?![\w/?#&=%-]|\.\w)", canonical, text)
        for real, canonical in self._servers():
            text = re.sub(re.escape(real) + r"(?![\w-]|\.\w)", canonical, text)
        return text

    def local(self, url: str) -> str:
        """The real address of what an agent calls ``url``; a missing scheme is taken to be http."""
        url = url.strip()
        if not _SCHEME.match(url) or _HOST_AND_PORT.match(url):
            url = f"http://{url}"
        plain = _SPELLING.sub("http://", url)
        for real, canonical in self._entrances():
            if plain.rstrip("/") == canonical:
                return real
        for real, canonical in self._servers():
            rest = plain.removeprefix(canonical)
            if rest != plain and rest[:1] in ("", "/", "?", "#"):
                return real + rest
        return url

    def _entrances(self) -> list[tuple[str, str]]:
        """(real, canonical) addresses of sites that begin on a page of their server."""
        pairs = [(address, CANONICAL[name]) for name, address in self.real.items() if urlsplit(address).path]
        return sorted(pairs, key=lambda pair: -len(pair[0]))

    def _servers(self) -> list[tuple[str, str]]:
        """(real, canonical) addresses of the servers."""
        return [(_origin(address), _origin(CANONICAL[name])) for name, address in self.real.items()]
