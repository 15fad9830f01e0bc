"""Takes personal data out of texts: user and host names, home folders, where things are installed, addresses, UUIDs."""

from __future__ import annotations

import os
import pwd
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Keys of JSON objects that are left out.
UNIQUE = ("uuid", "serial")

# Names that belong to nobody, and words of our own that a name may happen to be.
COMMON = {"root", "localhost", "auto", "cuda", "hip", "sim", "gpu", "device", "direct", "staged", "pyxdev"}

_PATTERNS = (
    (r"\b(?:GPU|MIG)-[0-9a-fA-F]+(?:-[0-9a-fA-F]+)*\b", "[uuid]"),
    (r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b", "[uuid]"),
    (r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b", "[address]"),
    (r"(?<![\w.:])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w.])", "[address]"),
    (r"(?<![\w.:])(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}(?![\w.:])", "[address]"),
    (r"(?<![\w.:])(?:[0-9a-fA-F]{1,4}:){1,6}(?::[0-9a-fA-F]{1,4}){1,6}(?![\w.:])", "[address]"),
)
_DOTTED = re.compile(r"[0-9.]+")


@dataclass(frozen=True)
class Privacy:
    """users, hosts: names. folders: what stands for each, longest first."""

    users: tuple[str, ...]
    hosts: tuple[str, ...]
    folders: tuple[tuple[str, str], ...]

    @classmethod
    def of_this_machine(cls, environ: Mapping[str, str] = os.environ) -> Privacy:
        """What may be told of whoever runs this, and where."""
        users = {environ.get(name, "") for name in ("LOGNAME", "USER", "SUDO_USER")}
        homes = {environ.get("HOME", ""), environ.get("XDG_CACHE_HOME", "")}
        try:
            entry = pwd.getpwuid(os.getuid())
            users.add(entry.pw_name)
            homes.add(entry.pw_dir)
        except KeyError:
            pass  # a number without a name, in a container
        hosts = {socket.gethostname(), os.uname().nodename, environ.get("HOSTNAME", "")}
        hosts |= {host.partition(".")[0] for host in hosts}
        folders = dict.fromkeys(homes, "~")
        folders[os.getcwd()] = "[here]"
        folders[sys.prefix] = folders[sys.base_prefix] = "[python]"
        folders[str(Path(__file__).resolve().parents[2])] = "[pyxdev]"
        longest = sorted((path for path in folders if len(path) > 1), key=len, reverse=True)
        return cls(
            tuple(sorted(users - COMMON - {""})),
            tuple(sorted(hosts - COMMON - {""}, key=len, reverse=True)),
            tuple((path, folders[path]) for path in longest),
        )

    def text(self, text: str) -> str:
        """The text without all of it."""
        for path, sign in self.folders:
            text = re.sub(rf"{re.escape(path.rstrip('/'))}(?![\w.-])", sign, text)
        for pattern, sign in _PATTERNS:
            text = re.sub(pattern, sign, text)
        for names, sign in ((self.hosts, "[host]"), (self.users, "[user]")):
            for name in names:
                text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", sign, text, flags=re.IGNORECASE)
        return text

    def document(self, value: Any) -> Any:
        """The same of every text in a JSON document, and without keys that name one device of all there are. A value of
        digits and dots is a version."""
        if isinstance(value, dict):
            return {key: self.document(one) for key, one in value.items() if key not in UNIQUE}
        if isinstance(value, list):
            return [self.document(one) for one in value]
        if isinstance(value, str) and not _DOTTED.fullmatch(value):
            return self.text(value)
        return value
