"""Rewards that worker processes import in the tests. What the completion says decides what they do."""

import asyncio
import ctypes
import os
import sys
import threading
import time
from pathlib import Path


class Opaque(Exception):
    """An exception that no other process can be given: a lock and a closure are in it."""

    def __init__(self):
        super().__init__("opaque", threading.Lock(), lambda: None)


def connection():
    """The socket of a worker."""
    numbers = map(int, os.listdir("/proc/self/fd"))
    names = ((n, os.path.realpath(f"/proc/self/fd/{n}")) for n in numbers)
    return next(n for n, name in names if "/socket:" in name)


def behave(completion, label="none"):
    """The length of the label, unless the completion asks for trouble."""
    if completion == "loop":
        while True:
            pass
    if completion == "sleep in C":
        ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the interpreter's lock: no thread, no signal gets in
    if completion == "exit":
        os._exit(3)
    if completion == "sys.exit":
        sys.exit(0)
    if completion == "opaque":
        raise Opaque
    if completion == "interrupt":
        raise KeyboardInterrupt
    if completion == "forges":
        os.write(connection(), b"\0\0\0\0\0\0\0\x09123456789")
        time.sleep(1000)
    if completion == "nan":
        return float("nan")
    if completion == "none":
        return None
    if completion.startswith("wait"):
        time.sleep(float(completion.split()[1]))
    return float(len(label))


async def behave_async(completion):
    await asyncio.sleep(0.01)
    return behave(completion)


def echo(
    completion, completion_ids, prompt, images, sample, trainer_state, log_extra, log_metric, box, extra=None
):
    """1 when every argument is as it would be in the trainer's process."""
    assert completion == "abc" and completion_ids == [0, 1, 2]
    assert prompt[0]["content"][1]["text"].startswith("question")
    assert images[0].size == (2, 2) and sample.images[0].width >= 4
    assert (trainer_state.global_step, trainer_state.max_steps) == (7, 9)
    assert box == (1, {2: "two"}) and type(box) is tuple and extra == [(3,)]
    log_extra("seen", {"box": box})
    log_metric("area", 2.5)
    return 1.0


def watched(completion, sample, turns):
    """Time of the last frame of the tool's video, and the frames per second of the row's, which is the same."""
    (video,), (other,) = turns[1]["videos"], sample.videos
    assert [f.tobytes() for f in video.frames] == [f.tobytes() for f in other.frames]
    assert video.size == (84, 84)
    return video.times[-1] + other.fps


def echo_batch(completions, box, log_extra, log_metric, **kwargs):
    assert [c[0]["content"] for c in completions] == ["abc", "de"]
    assert len(kwargs["images"]) == len(kwargs["completion_ids"]) == 2 and "samples" not in kwargs
    log_extra("first", [b[0] for b in box])
    log_metric("count", len(completions))
    return [0.5, None]


def process(completion):
    return float(os.getpid())


def meets(completion, folder):
    """1 when, within 20 s, another process is in this function at the same time."""
    (Path(folder) / f"{os.getpid()}").touch()
    deadline = time.monotonic() + 20
    while len(list(Path(folder).iterdir())) < 2:
        if time.monotonic() > deadline:
            return 0.0
        time.sleep(0.01)
    return 1.0


def wrong_count(completions, **kwargs):
    return [1.0]


def bad_log(completion, log_metric):
    log_metric("m", float("nan"))
    return 1.0


def length_of(completion):
    return float(len(completion))


def lengths_of(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


class Judge:
    """A reward that is an object, with an argument of its own."""

    def __init__(self, mark=1.0):
        self.mark = mark

    def __call__(self, completion):
        return self.mark


judge = Judge(0.25)


def pops(completion, answers):
    answers.pop()
    return float(len(answers))
