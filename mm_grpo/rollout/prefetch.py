"""Prompts made ahead of the step that asks for them, in background threads.

While the engine samples and the learner works, the images of the next rows are decoded, resized and made into tensors.
Which rows those are, their order and their seeds are decided by others, and do not depend on it. What is wrong with
a row is raised when its prompt is asked for, never earlier.

Threads, because decoding, resizing and tensors release Python's lock, and nothing has to be copied between processes.
Each computes alone: helpers that OpenMP keeps for it would, by their number, make those of the training thread sleep
between two operations. Rows are read by the thread that asks (a user's dataset may belong to it), images are opened in
any thread, and the processor is used by one thread at a time (tokenizers and image processors keep state in a call).

Memory: the prompts of the step that runs, and those of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread
from typing import TYPE_CHECKING

import torch

from mm_grpo.background import BackgroundThreads
from mm_grpo.data.images import decoded_here

if TYPE_CHECKING:
    from mm_grpo.data.base import Rows
    from mm_grpo.processors.base import Processor
    from mm_grpo.types import Prompt, Sample


@dataclass(frozen=True)
class Made:
    """A prompt, and how many images were decoded for it."""

    prompt: Prompt
    decoded: int


class Prefetcher:
    """Makes prompts of a dataset's rows: before they are asked for where `ahead` names them, else when they are.

    Args:
        processor: makes a prompt of a sample.
        workers: threads; 0 makes every prompt in the calling thread, when it is asked for.
        prepare: changes a sample before the processor gets it.
    """

    def __init__(
        self,
        processor: Processor,
        workers: int,
        prepare: Callable[[Sample], Sample] | None = None,
    ) -> None:
        self.prepare = prepare
        self.processor, self.workers = processor, workers
        self._threads: BackgroundThreads | None = None
        self._ahead: dict[tuple[Rows, int], Callable[[], Made]] = {}
        self._processing = Lock()
        self._asking = Lock()  # an evaluation and a step that is sampled ahead may ask at once

    def ahead(self, dataset: Rows, rows: Iterable[int]) -> None:
        """Begin with the prompts of rows that will be asked for next. Raises nothing."""
        with self._asking:
            for row in rows if self.workers else ():
                if (dataset, row) not in self._ahead:
                    self._ahead[dataset, row] = self._begun(dataset, row)

    def begin(self, dataset: Rows, row: int) -> Callable[[], Made]:
        """Ask for the prompt of a row. The function that is returned waits for it, and raises what is wrong with it.

        Rows that are begun before the first is waited for are made side by side.
        """
        with self._asking:
            return self._ahead.pop((dataset, row), None) or self._begun(dataset, row)

    def process(self, sample: Sample) -> Prompt:
        """The prompt of a sample; one thread at a time."""
        with self._processing:
            return self.processor.prompt(self.prepare(sample) if self.prepare is not None else sample)

    def close(self) -> None:
        """Forget what was begun. A thread ends when the prompt that it is making is finished."""
        self._ahead.clear()
        if self._threads is not None:
            self._threads.close()
        self._threads = None

    def _begun(self, dataset: Rows, row: int) -> Callable[[], Made]:
        try:
            opener = dataset.opener(row)
        except Exception as error:
            failed: Future[Made] = Future()
            failed.set_exception(error)
            return failed.result
        if not self.workers:
            return partial(self._make, opener)
        if self._threads is None:
            begin = partial(_compute_alone, torch.get_num_threads())
            self._threads = BackgroundThreads(self.workers, "mm_grpo prompts", begin)
        return self._threads.submit(partial(self._make, opener)).result

    def _make(self, opener: Callable[[], Sample]) -> Made:
        before = decoded_here()
        sample = opener()
        decoded = decoded_here() - before
        return Made(self.process(sample), decoded)


def _compute_alone(others: int) -> None:
    """Limit torch to this thread for what it computes; threads that are made later use `others` as before."""
    torch.get_num_threads()  # a thread's first look takes the default, whatever was set before
    torch.set_num_threads(1)  # of this thread, and the default of those to come
    restoring = Thread(target=torch.set_num_threads, args=(others,))
    restoring.start()
    restoring.join()
