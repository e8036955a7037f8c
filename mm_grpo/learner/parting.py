"""How several processes end: one message for what is one cause.

What fails in one process fails in all (`Ranks.together`), and each would say so. Here the first process leaves
its last words in the store that the processes met in, and the others keep silent when theirs are the same.
The store is asked in a thread: on a host that has fallen silent it keeps one waiting past its own time-out.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from mm_grpo.learner.distributed import RankLost, lost_text

LAST_WORDS = "mm_grpo/last_words"
"""Where the first process leaves what it said."""


def has_to_say(message: str, *, echo: bool = False) -> bool:
    """Whether this process, which is about to end, has to say why; false when the first one says the same.

    An `echo`, of the end of another process, is not needed when the first one says anything. The others wait for it,
    but not for long: a launcher ends all when one has ended, and the first one may be writing the report still.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    store, first = dist.distributed_c10d._get_default_store(), dist.get_rank() == 0
    patience = 5.0 if echo else 20.0
    store.set_timeout(timedelta(seconds=patience))
    heard: list[str] = []

    def ask() -> None:
        with suppress(RuntimeError):  # the first one is gone
            if first:
                store.set(LAST_WORDS, message)
            else:
                heard.append(store.get(LAST_WORDS).decode())

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return not heard or (not echo and heard[0] != message)


def lost_another(error: RuntimeError) -> str | None:
    """What to say of an error by which this process lost another one; None when it is about something else.

    DeepSpeed exchanges gradients itself, so the words are ours, gloo's or NCCL's.
    """
    if isinstance(error, RankLost):
        return str(error)
    text = str(error)
    broken = "gloo" in text and any(words in text for words in ("Connection ", "Timed out"))
    if not (broken or isinstance(error, dist.DistError)):
        return None
    where = (
        f"process {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "this process"
    )
    return f"{where} {lost_text('gradients', error)} run.process_timeout; its own output says why"
