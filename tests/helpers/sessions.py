"""Worker processes, whether processes have ended, and what they started in their sessions."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from mm_grpo.user_code import server


def stat(pid: int) -> list[str]:
    """State, parent, group, session, ... of a process, as in /proc/PID/stat; Z alone for one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z"]


def session(of: int) -> list[int]:
    """The living processes of a session."""
    found = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [pid for pid in found if (fields := stat(pid))[0] != "Z" and int(fields[3]) == of]


def workers() -> list[int]:
    """The living workers of this process."""
    started = server._server
    if started is None or started.owner != os.getpid():
        return []
    found = sorted(int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return [pid for pid in found if (fields := stat(pid))[0] != "Z" and int(fields[1]) == started.process.pid]


def died(processes: Iterable[int], seconds: float = 60.0) -> bool:
    """Whether none of these processes, nor of their sessions, is left after so many seconds at most."""
    end = time.monotonic() + seconds
    while left := [pid for pid in processes if stat(pid)[0] != "Z" or session(pid)]:
        if time.monotonic() > end or os.getpid() in left:
            return False
        time.sleep(0.02)
    return True
