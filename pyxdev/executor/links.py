"""The links of an executor, by ordered pair of devices."""

from __future__ import annotations

from collections.abc import Mapping

from pyxdev import topology
from pyxdev._native import Link, Runtime
from pyxdev.executor.plan import LinkPlan
from pyxdev.settings import Settings
from pyxdev.topology import Pair


class Links:
    """Opens a link when a pair is first asked for."""

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        self._runtime = runtime
        self._settings = settings
        self._open: dict[tuple[int, int], tuple[Link, Pair]] = {}

    def between(self, src: int, dst: int) -> Link:
        """Raises NoPeerAccess where direct copies are asked for and not possible."""
        known = self._open.get((src, dst))
        if known is not None:
            return known[0]
        pair = topology.choose(self._runtime, src, dst, self._settings.host_stage)
        link = self._runtime.link(
            src, dst, **pair.link_options(), tile_bytes=self._settings.tile_bytes, gate=self._settings.gate
        )
        self._open[src, dst] = link, pair
        return link

    def all(self) -> list[Link]:
        """Those that are open."""
        return [link for link, _ in self._open.values()]

    def plan(self, sent: Mapping[tuple[int, int], int]) -> tuple[LinkPlan, ...]:
        """sent: bytes of a microbatch by (src, dst)."""
        return tuple(
            LinkPlan(
                src, dst, pair.path, pair.why, 0 if link.closed else link.pinned_bytes, sent.get((src, dst), 0),
                topology.rate(pair, sent.get((src, dst), 0)),
            )
            for (src, dst), (link, pair) in self._open.items()
        )  # fmt: skip

    def close(self) -> None:
        for link, _ in self._open.values():
            link.close()
