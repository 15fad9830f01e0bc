"""What a stage sees and returns: arrays of NumPy, torch, CuPy, numba or cuda.core, or pyxdev's own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from pyxdev._native import Runtime
from pyxdev._pipeline import Stopped
from pyxdev.adapters.activation import Activation, Joined, Layout, Layouts, Value
from pyxdev.adapters.adapter import Adapter
from pyxdev.adapters.function import CFunction
from pyxdev.errors import BackendUnavailable, InvalidArgument, Unsupported

__all__ = [
    "NAMES", "Activation", "Adapter", "Joined", "Layout", "Layouts", "Stopped", "Value", "choose", "make",
]  # fmt: skip


class Known(NamedTuple):
    """An adapter: where it is, what must be imported for it, the extra that installs that, where it runs."""

    module: str
    kind: str
    needs: tuple[str, ...]
    extra: str
    backends: tuple[str, ...]


_GPUS = ("cuda", "hip")
_KNOWN = {
    "numpy": Known("numpy", "NumpyAdapter", (), "", ("sim",)),
    "torch": Known("torch", "TorchAdapter", ("torch",), "torch", ("sim", *_GPUS)),
    "cupy": Known("cupy", "Cupy", ("cupy",), "cupy", _GPUS),
    "numba": Known("numba", "Numba", ("numba.cuda",), "numba", ("cuda",)),
    "cuda.core": Known("cuda_core", "CudaCore", ("cuda.core", "cuda.bindings"), "cuda-core", ("cuda",)),
    "raw": Known("raw", "RawAdapter", (), "", ("sim", *_GPUS)),
    "c": Known("function", "FunctionAdapter", (), "", ("sim", *_GPUS)),
}
_LIBRARIES = ("cupy", "numba", "cuda.core")  # those of library.py
NAMES = ("auto", *_KNOWN)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def choose(name: str, runtime: Runtime, fn: Any) -> str:
    """The adapter's name for "auto": fn(x) is for "torch" or "cupy", whichever it is from or its code names, and
    fn(stage, x) for "numba" or "cuda.core". Where nothing tells, it is "numpy" on simulated devices; on others "raw"
    for fn(stage, x), and for fn(x) whichever of torch and CuPy is imported. A C function has its own, "c", whatever the
    name.

    Raises InvalidArgument for a name that is none, Unsupported for one that the backend cannot serve,
    BackendUnavailable where torch is built for other devices.
    """
    if name not in NAMES:
        raise InvalidArgument(f"adapter is {name!r}; allowed: {', '.join(NAMES)}")
    if isinstance(fn, CFunction):
        return "c"
    if name == "c":
        raise InvalidArgument(f"adapter is 'c', for C functions; a stage is {fn!r}")
    if name == "auto":
        name = _told_by(fn, runtime.backend)
    if name == "torch" and runtime.backend in _GPUS:
        _check_build(runtime.backend)
    if not _runs_on(name, runtime.backend):
        fit = [other for other in _KNOWN if _runs_on(other, runtime.backend)]
        raise Unsupported(f"the {name} adapter does not run on {runtime.backend} devices; these do: {', '.join(fit)}")
    return name


def torch_is_for(torch: Any) -> str:
    """The backend that this torch is built for: "cuda", "hip", or "cpu" for none; "" if it does not tell."""
    built = getattr(torch, "version", None)
    if built is None:
        return ""
    return "hip" if built.hip else "cuda" if built.cuda else "cpu"


def _check_build(backend: str) -> None:
    """One and the same torch names its devices "cuda" on both vendors' GPUs, but can use only one vendor's."""
    try:
        torch = import_module("torch")
    except ImportError:
        return  # make() says so
    built = torch_is_for(torch)
    if built in ("", backend):
        return
    names = {"cuda": f"CUDA {torch.version.cuda}", "hip": f"ROCm (HIP {torch.version.hip})", "cpu": "the CPU alone"}
    wanted = {"cuda": "CUDA", "hip": "ROCm"}[backend]
    other = f", or choose the backend {built}" if built in _GPUS else ""
    raise BackendUnavailable(
        f"torch {torch.__version__} is built for {names[built]}, but the devices are of the backend {backend}: "
        f"install a {wanted} build of torch{other}"
    )


def _told_by(fn: Callable[..., Any], backend: str) -> str:
    takes_stage = _takes_stage(fn)
    fits = [name for name in (("numba", "cuda.core") if takes_stage else ("torch", "cupy")) if _runs_on(name, backend)]
    named = {_library_of(thing) for thing in _looked_at(fn)}
    told = [name for name in fits if name in named]
    if not told and backend != "sim" and not takes_stage:
        told = [name for name in fits if name in sys.modules]
    return told[0] if told else "numpy" if backend == "sim" else "raw"


def _runs_on(name: str, backend: str) -> bool:
    return backend in _KNOWN[name].backends


def _looked_at(fn: Any) -> Iterator[Any]:
    """What tells the library of a stage: its type, and what its code refers to."""
    while isinstance(fn, partial) or hasattr(fn, "__wrapped__"):
        fn = fn.func if isinstance(fn, partial) else fn.__wrapped__
    yield fn
    call = fn if inspect.isroutine(fn) else type(fn).__call__
    yield getattr(call, "__self__", None)
    call = getattr(call, "__func__", call)
    code = getattr(call, "__code__", None)
    if code is not None:
        yield from (call.__globals__[name] for name in code.co_names if name in call.__globals__)
        yield from (cell.cell_contents for cell in call.__closure__ or () if _is_set(cell))


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _library_of(thing: Any) -> str:
    """The adapter for a module, or for an object whose type is of a library."""
    modules = [thing.__name__] if isinstance(thing, ModuleType) else [base.__module__ for base in type(thing).__mro__]
    if callable(thing) and not isinstance(thing, ModuleType):
        modules.append(getattr(thing, "__module__", None) or "")
    for name in ("torch", *_LIBRARIES):
        package = _KNOWN[name].needs[0]
        if any(module == package or module.startswith(f"{package}.") for module in modules):
            return name
    return ""


def _takes_stage(fn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    wanted = [one for one in parameters if one.kind in _POSITIONAL and one.default is one.empty]
    return len(wanted) == 2


def make(name: str, layouts: Layouts, backend: str) -> Adapter:
    """An adapter for one stage, on devices of a backend. name: as choose() gives it.

    Raises BackendUnavailable if its library is missing.
    """
    known = _KNOWN[name]
    for needed in known.needs:
        try:
            import_module(needed)
        except ImportError as error:
            raise BackendUnavailable(
                f"the {name} adapter needs {needed}: pip install 'pyxdev[{known.extra}]' ({error})"
            ) from error
    if name == "torch" and backend == "sim":
        from pyxdev.adapters.torch_simulated import SimulatedTorchAdapter

        return SimulatedTorchAdapter(layouts)
    kind = getattr(import_module(f"pyxdev.adapters.{known.module}"), known.kind)
    if name in _LIBRARIES:
        from pyxdev.adapters.library import LibraryAdapter

        return LibraryAdapter(name, layouts, kind)
    adapter: Adapter = kind(layouts)
    return adapter
