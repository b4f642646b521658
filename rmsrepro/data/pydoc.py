"""The help topics of Python's standard library as a small corpus of technical English.

`pydoc_data.topics` is what ``help("topics")`` shows: about 465 kB, present in every CPython, so a language
model can be trained without a download. The text differs a little between Python versions; the version is
recorded and the text is part of the data hash.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from importlib import import_module

from rmsrepro.config.errors import UserError


@lru_cache(maxsize=1)
def pydoc_text() -> str:
    """Return all help topics, in alphabetical order of their names, one after the other.

    Raises:
        UserError: this Python was installed without its help topics.
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:
        raise UserError(
            "data=pydoc: this Python has no help topics (module pydoc_data); "
            "use data=text_files data.train=FILE"
        ) from None
    return "\n".join(topics[name].replace("\r\n", "\n") for name in sorted(topics))


def pydoc_versions() -> dict[str, str]:
    """The version that the text comes from."""
    return {"python": platform.python_version()}
