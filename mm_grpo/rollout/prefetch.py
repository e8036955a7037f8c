"""Prompts made ahead of the step that asks for them, in background threads.

While the engine samples and the learner works, the images of the next rows are decoded, resized and made into tensors.
Which rows come next, their order and their seeds do not depend on it. What is wrong with a row is raised when its
prompt is asked for, never earlier. Memory: the prompts of the step that runs and of the next one.

Threads, because decoding, resizing and tensors release Python's lock, and nothing has to be copied between processes.
Rows are read by the thread that asks (a user's dataset may belong to it), images are opened in any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread
from typing import TYPE_CHECKING, Protocol

import torch

from mm_grpo.background import BackgroundThreads
from mm_grpo.data.images import decoded_here
from mm_grpo.processors.base import check_followed

if TYPE_CHECKING:
    from mm_grpo.data.base import Rows
    from mm_grpo.processors.base import Processor
    from mm_grpo.types import Prompt, Sample


@dataclass(frozen=True)
class Prefetched:
    """A prompt, and how many "images" and "frames" of videos were decoded for it."""

    prompt: Prompt
    decoded: Counter[str]


class SamplePreparer(Protocol):
    """Something that changes samples before the processor gets them."""

    @property
    def same_thread(self) -> bool:
        """True if `prepare` has to run in the thread that asks for the prompt."""

    def prepare(self, sample: Sample) -> Sample: ...


class Prefetcher:
    """Makes prompts of a dataset's rows: in the background after `ahead`, else when they are asked for.

    Args:
        processor: makes a prompt of a sample.
        workers: threads; 0 makes every prompt in the calling thread, when it is asked for.
        preparer: changes a sample before the processor gets it.
    """

    def __init__(self, processor: Processor, workers: int, preparer: SamplePreparer | None = None) -> None:
        self.processor, self.preparer = processor, preparer
        self.workers = 0 if preparer is not None and preparer.same_thread else workers
        self._threads: BackgroundThreads | None = None
        self._ahead: dict[tuple[Rows, int], Callable[[], Prefetched]] = {}
        self._processing = Lock()  # tokenizers and image processors keep state in a call
        self._asking = Lock()  # an evaluation and a step that is sampled ahead may ask at once

    def ahead(self, dataset: Rows, rows: Iterable[int]) -> None:
        """Begin with the prompts of rows that will be asked for next. Raises nothing."""
        with self._asking:
            for row in rows if self.workers else ():
                if (dataset, row) not in self._ahead:
                    self._ahead[dataset, row] = self._start(dataset, row)

    def begin(self, dataset: Rows, row: int) -> Callable[[], Prefetched]:
        """Ask for the prompt of a row; returns a function that waits for it, and raises what is wrong with the row.

        Prompts that begin before the first is waited for are made side by side.
        """
        with self._asking:
            return self._ahead.pop((dataset, row), None) or self._start(dataset, row)

    def process(self, sample: Sample) -> Prompt:
        """Return the prompt of a sample; one thread at a time."""
        check_followed(self.processor, sample)
        with self._processing:
            return self.processor.prompt(sample if self.preparer is None else self.preparer.prepare(sample))

    def close(self) -> None:
        """Forget all prompts. A thread ends when the prompt that it is making is finished."""
        self._ahead.clear()
        if self._threads is not None:
            self._threads.close()
        self._threads = None

    def _start(self, dataset: Rows, row: int) -> Callable[[], Prefetched]:
        try:
            opener = dataset.opener(row)
        except Exception as error:
            failed: Future[Prefetched] = Future()
            failed.set_exception(error)
            return failed.result
        if not self.workers:
            return partial(self._make, opener)
        if self._threads is None:
            begin = partial(_use_one_thread, torch.get_num_threads())
            self._threads = BackgroundThreads(self.workers, "mm_grpo prompts", begin)
        return self._threads.submit(partial(self._make, opener)).result

    def _make(self, opener: Callable[[], Sample]) -> Prefetched:
        before = decoded_here()
        sample = opener()
        decoded = decoded_here() - before
        return Prefetched(self.process(sample), decoded)


def _use_one_thread(default: int) -> None:
    """Limit torch to this thread for what it computes; threads that are made later use `default` as before.

    OpenMP keeps helpers for each thread that computes. More helpers than cores would make the training
    thread's sleep between two operations.
    """
    torch.get_num_threads()  # a thread's first look takes the default, whatever was set before
    torch.set_num_threads(1)  # of this thread, and the default of those to come
    restoring = Thread(target=torch.set_num_threads, args=(default,))
    restoring.start()
    restoring.join()
