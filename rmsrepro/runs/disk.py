"""A disk that is full, or that nothing may be written to: what to say of it. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

from rmsrepro.config.errors import UserError, causes
from rmsrepro.config.paths import expanded

_REASONS = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "holds as much of yours as your quota allows",
    errno.EFBIG: "takes no file so large (a limit of the shell or the file system: ulimit -f)",
}


def disk_full(error: BaseException) -> OSError | None:
    """Return the error of a full disk that is behind `error`: itself, its cause, or what it arose from."""
    full = (one for one in causes(error) if isinstance(one, OSError) and one.errno in _REASONS)
    return next(full, None)


GOES_ON = "then the same command goes on from the last checkpoint"


def explain_full(error: BaseException, folder: Path, then: str = GOES_ON) -> str | None:
    """Say which disk is full and what to do; None when that is not what `error` is about.

    Args:
        folder: of the run; where `error` names another file, it is that one's disk.
        then: what follows on doing so.
    """
    full = disk_full(error)
    if full is None or full.errno is None:
        return None
    place = _existing(Path(str(full.filename)) if full.filename else folder)
    free = ""
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(place)
        free = f" ({usage.free / 1e6:.0f} MB free of {usage.total / 1e6:.0f} MB)"
    advice = "Make room there, or"
    if full.errno == errno.EFBIG:  # however much room there is
        free, advice = "", "Raise the limit (ulimit -f unlimited), or, if it is the file system's,"
    return (
        f"{full.strerror or 'cannot write'}: the disk of {place}{free} {_REASONS[full.errno]}. {advice} "
        f"move the outputs to another disk and name it by out_dir=DIR; {then}"
    )


def _existing(path: Path) -> Path:
    """The nearest folder above `path` that is there."""
    path = path.absolute()
    return next((one for one in (path, *path.parents) if one.is_dir()), Path("/"))


def check_writable(out_dir: str | Path, key: str = "out_dir") -> Path:
    """Return the folder of `out_dir`, in which something was written and removed again.

    Folders that are missing are made, and removed.

    Raises:
        UserError: nothing can be written there; a full disk is not meant, which comes and goes.
    """
    folder = expanded(out_dir)
    missing: list[Path] = []
    try:
        try:
            for path in (folder, *folder.parents):
                if os.path.exists(path):  # unlike Path's, no error for a name that is too long
                    break
                missing.append(path)
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        finally:
            for path in missing:
                with contextlib.suppress(OSError):  # not made, or another process is in it by now
                    path.rmdir()
    except OSError as error:
        if disk_full(error) is None:
            raise unwritable(folder, error, key) from error
    return folder


def unwritable(folder: Path, error: OSError, key: str = "out_dir") -> UserError:
    """The error for a folder that nothing can be written to."""
    file = Path(str(error.filename)) if error.filename else folder
    if error.errno == errno.EISDIR and file != folder:
        return UserError(f"{key}={folder}: {file} is a folder, where a file has to be; move it away")
    reason = in_the_way(folder) or f"nothing can be written there ({error.strerror or error})"
    return UserError(f"{key}={folder}: {reason}; name a folder that you may write to: {key}=DIR")


def in_the_way(folder: Path) -> str | None:
    """Say what stands where `folder` or one above it would be, and is none; None where nothing does."""
    for one in (folder, *folder.parents):
        try:
            mode = os.stat(one).st_mode
        except OSError as error:  # it may not be looked at, or its name is too long: then those above tell
            if os.path.islink(one) and error.errno == errno.ELOOP:
                return f"{one} is a link that leads back to itself"
            if os.path.islink(one) and error.errno == errno.ENOENT:
                return f"{one} is a link to nothing ({os.readlink(one)} is not there)"
            continue
        return None if stat.S_ISDIR(mode) else f"{one} is a file, not a folder"
    return None
