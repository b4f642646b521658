"""The built kernels, loaded: functions by name, called with plain numbers.

`why_unavailable` answers without torch. `kernels` loads the library, after torch: both then share one pool of
threads, since torch brings the OpenMP library under the name that the kernels ask for.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from rmsrepro.norms.backends.fused.building import find_or_build
from rmsrepro.norms.backends.fused.compilers import KernelsUnavailable


@cache
def why_unavailable() -> str | None:
    """Return what the CPU kernels lack on this machine, in one sentence; None when they are built.

    Builds them if need be, within seconds, and says so on the standard error.
    """
    try:
        find_or_build(_say)
    except (KernelsUnavailable, ValueError) as error:
        return str(error)
    return None


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def loaded_kernels() -> dict[str, str] | None:
    """Return `level` (of instructions) and `library` of the kernels that this process uses, for records.

    Results of different levels differ in rounding. None where the process has used none.
    """
    if not kernels.cache_info().currsize:
        return None
    used = kernels()
    return {"level": used.level, "library": f"{used.path.parent.name}/{used.path.name}"}


Call = Callable[..., int]
"""call(function, field, ...) -> 0, or what went wrong."""


class Kernels:
    """The functions of one level.

    Attributes:
        path: the library's file.
        level: name of the instruction level.
        call: `call(kernels.forward, field, ...)`, the fields as calls.hpp lists them.
    """

    def __init__(self, path: Path, level: str, *, fast: bool = True) -> None:
        self.path, self.level = path, level
        self._library = ctypes.CDLL(str(path))
        binding = _binding(path) if fast else None
        self.call: Call = _through_ctypes if binding is None else binding
        self.forward = self.address("forward")
        self.backward = self.address("backward")

    def address(self, name: str) -> int:
        """Return the address of the kernel `name`, to be called through `call`."""
        function = getattr(self._library, f"rmsrepro_{name}_{self.level}")
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        return address


@cache
def kernels() -> Kernels:
    """Return the kernels of this processor; built if need be.

    Raises:
        KernelsUnavailable: see its message.
        ValueError: RMSREPRO_KERNEL_LEVEL names a level that this processor has not.
    """
    import torch  # noqa: F401  (first: see the module's docstring)

    path, level = find_or_build(_say)
    try:
        return Kernels(path, level.name)
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(
            f"{path} cannot be loaded ({error}); rmsrepro build-kernels rerun=true builds another"
        ) from error


_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)


def _through_ctypes(address: int, *fields: int) -> int:
    array = (ctypes.c_int64 * len(fields))(*fields)  # which has to outlive the call
    return int(_FUNCTION(address)(ctypes.addressof(array)))


def _binding(path: Path) -> Call | None:
    """Return the binding inside the library; None where it was built without Python's headers."""
    name = "rmsrepro_kernels"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module: Any = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError:
        return None
    call: Call = module.call
    return call
