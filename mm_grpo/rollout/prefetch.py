"""Prompts made ahead of the step that asks for them, in background threads.

While the engine samples and the learner works, the images of the next rows are decoded, resized and made into tensors.
Which rows those are, their order and their seeds are decided by others, and do not depend on it. What is wrong with
a row is raised when its prompt is asked for, never earlier.

Threads, because decoding, resizing and tensors release Python's lock, and nothing has to be copied between processes.
Each computes alone: helpers that OpenMP keeps for it would, by their number, make those of the training thread sleep
between two operations. Rows are read by the thread that asks (a user's dataset may belong to it), images are opened in
any thread, and the processor is used by one thread at a time (tokenizers and image processors keep state in a call).

Memory: the rows of a step as they are stored, and of what is made of them no more than `max_bytes` before it is asked
for. Rows beyond that are left until they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock, RLock, Thread
from typing import TYPE_CHECKING, TypeVar

import torch

from mm_grpo.data.images import decoded_here
from mm_grpo.rollout.background import Background

if TYPE_CHECKING:
    from mm_grpo.data.dataset import Dataset
    from mm_grpo.processors.base import Processor
    from mm_grpo.types import Prompt, Sample

T = TypeVar("T")
OpenSample = Callable[[], "Sample"]


PREFETCH_BYTES = 4 * 1024**3
"""Most memory for pixels of prompts that no step has asked for yet, and of rows that are evaluated together."""


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
        max_bytes: most bytes of pixels that wait to be asked for. A thread that is at work is not stopped, so each
            may add one prompt to that.
        prepare: changes a sample before the processor gets it.
    """

    def __init__(
        self,
        processor: Processor,
        workers: int,
        max_bytes: int,
        prepare: Callable[[Sample], Sample] | None = None,
    ) -> None:
        self.prepare = prepare
        self.processor, self.workers, self.max_bytes = processor, workers, max_bytes
        self.held = 0
        """Bytes of pixels of the prompts that are made and were not asked for yet."""
        self._threads: Background | None = None
        self._ahead: dict[tuple[Dataset, int], tuple[OpenSample, Future[Made | None]]] = {}
        self._counting, self._processing = Lock(), Lock()
        self._asking = RLock()  # an evaluation and a step that is sampled ahead may ask at once

    def ahead(self, dataset: Dataset, rows: Iterable[int]) -> None:
        """Begin with the prompts of rows that will be asked for next. Raises nothing."""
        with self._asking:
            for row in rows if self.workers else ():
                if (dataset, row) not in self._ahead:
                    try:
                        opener = dataset.opener(row)
                    except Exception:  # the row is read again when it is asked for, and raises then
                        continue
                    self._ahead[dataset, row] = opener, self._submit(partial(self._make_ahead, opener))

    def begin(self, dataset: Dataset, row: int) -> Callable[[], Made]:
        """Ask for the prompt of a row. The function that is returned waits for it, and raises what is wrong with it.

        Rows that are begun before the first is waited for are made side by side.
        """
        with self._asking:
            opener, ahead = self._ahead.pop((dataset, row), (None, None))
            try:
                opener = opener or dataset.opener(row)
            except Exception as error:
                failed: Future[Made] = Future()
                failed.set_exception(error)
                return failed.result
            if not self.workers:
                return partial(self._make, opener)
            if ahead is None or ahead.cancel():
                return self._submit(partial(self._make, opener)).result
            return partial(self._taken, opener, ahead)

    def process(self, sample: Sample) -> Prompt:
        """The prompt of a sample; one thread at a time."""
        with self._processing:
            return self.processor.prompt(self.prepare(sample) if self.prepare is not None else sample)

    def close(self) -> None:
        """Forget what was begun. A thread ends when the prompt that it is making is finished."""
        self._ahead.clear()
        if self._threads is not None:
            self._threads.close()
        self._threads, self.held = None, 0

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        if self._threads is None:
            begin = partial(_compute_alone, torch.get_num_threads())
            self._threads = Background(self.workers, "mm_grpo prompts", begin)
        return self._threads.submit(call)

    def _taken(self, opener: OpenSample, ahead: Future[Made | None]) -> Made:
        """Return what was made ahead; make it now where there was no memory for it then."""
        if (made := ahead.result()) is None:
            return self._make(opener)
        self._hold(-pixel_bytes(made.prompt))
        return made

    def _make(self, opener: OpenSample) -> Made:
        before = decoded_here()
        sample = opener()
        decoded = decoded_here() - before
        return Made(self.process(sample), decoded)

    def _make_ahead(self, opener: OpenSample) -> Made | None:
        """Make a prompt ahead; None when the queue is at its memory limit."""
        if self.held >= self.max_bytes:
            return None
        made = self._make(opener)
        self._hold(pixel_bytes(made.prompt))
        return made

    def _hold(self, size: int) -> None:
        with self._counting:
            self.held += size


def pixel_bytes(prompt: Prompt) -> int:
    """The memory of a prompt's pixels, in bytes: decoded, resized, and as tensors."""
    pictures = {id(image): image for image in (*prompt.sample.images, *prompt.engine_prompt.images)}
    tensors = sum(tensor.nbytes for tensor in prompt.vision.values())
    return tensors + sum(3 * image.width * image.height for image in pictures.values())


def _compute_alone(others: int) -> None:
    """Limit torch to this thread for what it computes; threads that are made later use `others` as before."""
    torch.get_num_threads()  # a thread's first look takes the default, whatever was set before
    torch.set_num_threads(1)  # of this thread, and the default of those to come
    restoring = Thread(target=torch.set_num_threads, args=(others,))
    restoring.start()
    restoring.join()
