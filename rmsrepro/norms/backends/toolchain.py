"""What a machine needs to run the backends that are compiled. Read without torch."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from functools import cache
from pathlib import Path


@cache
def why_no_compiler() -> str | None:
    """Return what Inductor lacks to compile for this machine's processor, with what to do, or None.

    It is asked for on machines with a GPU as well: whether tensors will lie there is not known here, and
    kernels for the processor are compiled whenever they do not.
    """
    compiler, named = cxx(), os.environ.get("CXX")
    if compiler is None and named:
        return f"it needs a C++ compiler, and CXX={named} is no program; correct CXX"
    if compiler is None:
        return (
            "it needs a C++ compiler and there is none; install one (apt install g++, or the system's own "
            "package) or name yours in CXX"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if sys.platform != "win32" and not header.exists():
        return f"it compiles C++ against {header}, which is not there; install python3-dev"
    return None


def cxx() -> str | None:
    """Return the C++ compiler's path, CXX first, or None."""
    named = os.environ.get("CXX")
    names = [named] if named else ["cl"] if sys.platform == "win32" else ["g++", "clang++", "c++"]
    return next((path for path in map(shutil.which, names) if path is not None), None)


def why_no_kernels() -> str | None:
    """Return what the fused kernels lack, or None when they are built; it may build them, in seconds."""
    from rmsrepro.norms.backends.fused.library import why_unavailable

    return why_unavailable()
