"""Keeps every GPU of a machine busy: pipelines over several devices, copies between them, parallel model loading."""

from pyxdev import errors
from pyxdev._native import HOST, Array, Buffer, Event, Link, Ring, Runtime, Stream, Throttle
from pyxdev.adapters.function import CFunction
from pyxdev.backends import open
from pyxdev.errors import Error
from pyxdev.executor import Executor, Stage, Ticket, split
from pyxdev.loader.loader import load
from pyxdev.loader.weights import Weights

__all__ = [
    "HOST",
    "Array",
    "Buffer",
    "CFunction",
    "Error",
    "Event",
    "Executor",
    "Link",
    "Ring",
    "Runtime",
    "Stage",
    "Stream",
    "Throttle",
    "Ticket",
    "Weights",
    "errors",
    "load",
    "open",
    "split",
]
