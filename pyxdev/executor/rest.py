"""Waiting for a device where no order is known any more."""

from __future__ import annotations

from collections.abc import Iterable

from pyxdev._native import Link, Stream
from pyxdev.errors import DeviceFault

PATIENCE = 30.0  # seconds, of the runtime's clock, that closing and cleaning up give work in flight


def come_to_rest(streams: Iterable[Stream], links: Iterable[Link] = ()) -> None:
    """Returns when all that was queued on the streams and on the links' own is over.

    Raises DeviceFault if it is not, or if that cannot be known: then nothing may use the memory again.
    """
    try:
        for stream in streams:
            if not stream.synchronize(PATIENCE):
                raise DeviceFault(f"device {stream.device} did not come to rest in {PATIENCE:g} s")
        for link in links:
            link.drain()
    except DeviceFault:
        raise
    except BaseException as error:
        raise DeviceFault(f"whether the devices came to rest is unknown: {error!r}") from error
