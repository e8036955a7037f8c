"""The message with which several processes end: printed once, by one of them.

An error in one process is raised in all (`Ranks.fail_together`), and each would print it. So rank 0 puts its message
into the store of the process group, and the others print theirs only if it differs.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from mm_grpo.distributed.ranks import RankLost, lost_text

FIRST_ERROR = "mm_grpo/first_error"
"""Key of rank 0's message in the store."""


def should_report(message: str, *, lost: bool = False) -> bool:
    """Return True if this process, which is about to end with `message`, prints it; False if rank 0 prints the same.

    With `lost` the message is about another process that ended, and is not needed if rank 0 prints anything. The
    others wait for rank 0, which may still be writing the report, but not for long: a launcher ends all processes
    when one has ended.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    store, first = dist.distributed_c10d._get_default_store(), dist.get_rank() == 0
    timeout = 5.0 if lost else 20.0
    store.set_timeout(timedelta(seconds=timeout))
    messages: list[str] = []

    def exchange() -> None:
        with suppress(RuntimeError):  # the store is gone with the process that held it
            if first:
                store.set(FIRST_ERROR, message)
            else:
                messages.append(store.get(FIRST_ERROR).decode())

    # in a thread, because the store waits past its own time-out for a host that stopped answering
    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    thread.join(timeout)
    return not messages or (not lost and messages[0] != message)


def lost_another(error: RuntimeError) -> str | None:
    """Return the message for an error by which this process lost another one; None for any other error.

    DeepSpeed reduces gradients itself, so the error may be gloo's or NCCL's own.
    """
    if isinstance(error, RankLost):
        return str(error)
    text = str(error)
    broken = "gloo" in text and any(phrase in text for phrase in ("Connection ", "Timed out"))
    if not (broken or isinstance(error, dist.DistError)):
        return None
    where = (
        f"process {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "this process"
    )
    return f"{where} {lost_text('gradients', error)} run.process_timeout; its own output says why"
