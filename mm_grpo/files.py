"""Paths as users write them, atomic writes, and temporary folders.

Only `expand_home` knows what `~` means; `open_regular_file` opens no pipe and no device. A file or a folder is filled
under a temporary name, then renamed, so it is never half written. A file that a user names is an `OutputFile`.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import glob
import io
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from mm_grpo.errors import ConfigError

LARGEST_JSON = 2**30
"""Most bytes of a JSON file or of a server's answer; a token with its log-prob takes some 100."""
RUN_MARK = "mm_grpo_run.json"
"""File that marks a folder as a run's (run/lock.py)."""
TEMPORARY = "mm_grpo_tmp_"
_DEEP = re.compile(r"(?:^|(?<=/))\*\*(?:/+|$)")
STALE_AFTER = 60.0
"""Seconds after which a temporary folder that nobody locks counts as a killed process's."""


def expand_home(path: str) -> str:
    """Return a path with `~` or `~user` at its start replaced by that home folder.

    Raises ValueError for an unknown user; its text follows the path in a message.
    """
    expanded = os.path.expanduser(path)
    if path.startswith("~") and expanded == path:
        raise ValueError(f"there is no user {path.split('/')[0][1:]!r} here; write the path in full")
    return expanded


def short_path(path: object, limit: int = 300) -> str:
    """Return a path as a message shows it; only its beginning if it is too long for a file."""
    text = str(path)
    return text if len(text) <= limit else f"{text[:60]}... ({len(text)} characters)"


def expand_glob(pattern: str) -> list[str]:
    """Return the paths that match, sorted, each file once; a `**` follows links too."""
    paths: dict[str, str] = {}
    for path in sorted(_matches(pattern), key=len):
        paths.setdefault(os.path.realpath(path), path)
    return sorted(paths.values())


def _matches(pattern: str) -> list[str]:
    # not glob's own `**`, which goes in circles when links lead up
    top, *tail = _DEEP.split(pattern, maxsplit=1)
    if not tail:
        return glob.glob(pattern)
    folders = [folder for start in glob.glob(top or ".") for folder in folders_below(start)]
    inner = [glob.escape(folder.removeprefix("./") if folder != "." else "") for folder in folders]
    return [path for folder in inner for path in _matches(os.path.join(folder, tail[0] or "*"))]


def folders_below(top: str) -> Iterator[str]:
    """Yield a folder and all below it that are not hidden, nearest first, each real folder once."""
    folders, real_folders = [top], set[str]()
    for folder in folders:
        if (real := os.path.realpath(folder)) not in real_folders:
            real_folders.add(real)
            yield folder
            folders += sorted(glob.glob(os.path.join(glob.escape(folder), "*", "")), key=len)


def open_regular_file(path: str | Path) -> BinaryIO:
    """Open a file to be read, without waiting for a pipe, a socket or a device.

    Raises OSError for anything but a regular file; its `strerror` says what is there.
    """
    # the path is not checked first: it may change, and open waits for the writer of a pipe
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "a pipe, a socket or a device, not a file", str(path))


def read_regular_file(path: str | Path, limit: int = -1) -> bytes:
    """Read at most `limit` bytes of a file. Raises as `open_regular_file`."""
    with open_regular_file(path) as file:
        return file.read(limit)


def parse_json(data: str | bytes, kind: type = object) -> Any:
    """Parse JSON that somebody else wrote, and return its value, a `kind` such as dict.

    Raises ValueError with one short line for any other kind and for invalid JSON.
    """
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("holds lists or mappings too deep within one another") from None
    if not isinstance(value, kind):
        raise ValueError(f"holds a {type(value).__name__} where a {kind.__name__} is expected")
    return value


def read_json(path: Path, kind: type = object) -> Any:
    """Parse a regular file of at most LARGEST_JSON bytes as `parse_json` does. Raises OSError too."""
    data = read_regular_file(path, LARGEST_JSON + 1)
    if len(data) > LARGEST_JSON:
        raise ValueError(f"has more than {LARGEST_JSON} bytes")
    return parse_json(data, kind)


def atomic_write(path: Path, data: str | bytes, *, durable: bool = True) -> None:
    """Put `data` at `path`; the file is either the old one or the new one, never a mixture.

    Text is written as UTF-8, with ? for what UTF-8 cannot hold. With `durable` the file is on the disk on return, so
    it also survives a power cut. A failure leaves nothing behind.
    """
    # not tempfile: only their owner can read its files, and a rename keeps that
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with tmp.open("wb") as file:
            file.write(data.encode(errors="replace") if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


class OutputFile:
    """File that a user names by `option`, checked when this is made, before its content is computed.

    A regular file is replaced if `mark` stands near its start, and with None never. Raises ConfigError for any other
    file, a link or a device, or a folder that is missing or not writable.
    """

    def __init__(self, option: str, named: str | Path, mark: bytes | None = b"") -> None:
        self.option, self.named, self.mark = option, short_path(named), mark
        try:
            self.path = Path(expand_home(str(named)))
            self._check()
        except FileNotFoundError:
            raise self._refused(f"no folder '{self.path.parent}'; make it, or name another") from None
        except (OSError, ValueError) as error:
            raise self._refused(f"{getattr(error, 'strerror', None) or error}; name another file") from None

    def write(self, text: str) -> None:
        """Write the text in one piece. Raises ConfigError if it cannot be written."""
        try:
            self._check()
            atomic_write(self.path, text)
        except OSError as error:
            raise self._refused(f"cannot be written ({error.strerror or error})") from None

    def _check(self) -> None:
        if self.path.is_symlink():
            raise self._refused("is a link; name the file that it leads to")
        with tempfile.TemporaryFile(dir=self.path.parent), suppress(FileNotFoundError):
            head = read_regular_file(self.path, 1000)
            if self.mark is None or self.mark not in head:
                raise self._refused(
                    "is there already, not written by this command, and stays as it is; name another file"
                )

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"{self.option} '{self.named}': {why}")


def refuse_existing(paths: Iterable[Path]) -> None:
    """Raise ConfigError if one of the files that a command is to write exists."""
    if existing := [str(path) for path in paths if path.exists() or path.is_symlink()]:
        more = f" and {len(existing) - 1} more" if len(existing) > 1 else ""
        raise ConfigError(f"{existing[0]}{more} would be overwritten; name another folder")


def atomic_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder, and put it at `path` in place of the old one.

    A failure of `write` leaves the old folder as it was. A process killed between the two renames leaves it beside
    the path, as .NAME.old, and the next call starts by putting it back.
    """
    new, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        os.replace(old, path)
    for leftover in (new, old):
        remove(leftover)
    new.mkdir(parents=True)
    try:
        write(new)
        if path.exists():
            os.replace(path, old)
        os.replace(new, path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    with suppress(OSError):
        remove(old)


@contextmanager
def temporary_folder(purpose: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder `mm_grpo_PURPOSE_...` in `parent` (default: the system's temporary folder), removed at the end.

    Folders of killed processes are removed too: a process locks its folder while it lives. A folder younger than
    STALE_AFTER may not be locked yet, and stays.
    """
    _remove_stale(parent or Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}{purpose}_", dir=parent) as name:
        handle = os.open(name, os.O_RDONLY)
        try:
            with suppress(OSError):  # on a file system without locks nothing is removed either
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(handle)


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # another user's folder, or another process is removing it
            state = folder.lstat()
            old = time.time() - state.st_mtime > STALE_AFTER
            if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or not old:
                continue
            handle = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)


def encoded_image(image: Any, form: str = "png") -> bytes:
    """Encode an image of PIL as the bytes of a png or jpeg file."""
    file = io.BytesIO()
    image.save(file, form, compress_level=1, quality=90)  # a PNG's default level takes several times as long
    return file.getvalue()


def data_url(kind: str, data: bytes) -> str:
    """Return data of a media type, such as image/png, as a URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def remove(path: Path) -> None:
    """Remove a folder, a file, or a link without its target, if there is one. OSError when it stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
