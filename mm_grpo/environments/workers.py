"""Tools and environments in worker processes: a deadline for each call, and an end for what hangs or crashes.

A conversation stays in one worker, which makes one call at a time; the workers work side by side. A worker whose call
is late or that dies is killed with all that it started, and another one takes its place. With it go the environments
that it held: `Host` says what becomes of their conversations. Plain functions hold nothing, so that conversations
without an environment go on. Reading and writing never wait for a worker, which may stop in the midst of either.
"""

from __future__ import annotations

import itertools
import os
import pickle
import selectors
import socket
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mm_grpo.environments.factories import address_of
from mm_grpo.environments.host import Episode, Functions, Host, Task, log
from mm_grpo.environments.session import Answer, Factories
from mm_grpo.environments.worker import LENGTH, Load, most_bytes, serve, unpacked_answer
from mm_grpo.errors import ConfigError, ToolError
from mm_grpo.import_path import digest_of
from mm_grpo.worker_processes import START_LIMIT, Guard, WorkerProcess, ended, preload

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig

preload("mm_grpo.environments.worker")

READ = 2**20


class _Slot:
    """A place for one worker process after the other, with the conversations that are its. `queue` are the calls that
    wait, `task` is the one that is being made, `since` when it or the start of the process began. `rows` are those
    that the process was sent.
    """

    def __init__(self) -> None:
        self.process: WorkerProcess | None = None
        self.connection: socket.socket | None = None
        self.guard: Guard | None = None
        self.ready = False
        self.conversations = 0
        self.environments: set[Episode] = set()
        self.rows: set[int] = set()
        self.queue: deque[Task] = deque()
        self.task: Task | None = None
        self.since = 0.0
        self.out = memoryview(b"")
        self.read = bytearray()

    def start(self, load: Load, guard: Guard) -> None:
        ours, theirs = socket.socketpair()
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as many workers as cores compute at once
        self.process = WorkerProcess(target=serve, args=(theirs, load, environment), daemon=True)
        with theirs:
            self.process.start()
        self.guard = guard
        guard.watch(self.process.pid or 0)
        ours.setblocking(False)
        self.connection, self.ready, self.since = ours, False, time.monotonic()
        self.out, self.read = memoryview(b""), bytearray()
        self.rows.clear()

    def stop(self) -> str:
        """Kill the process with what it started; how it ended, if it did so by itself."""
        process, connection = self.process, self.connection
        self.process = self.connection = None
        self.ready = False
        if connection is not None:
            connection.close()
        if process is None:
            return ""
        code = process.exitcode
        process.terminate()
        process.join(5.0)
        if self.guard is not None:
            self.guard.watch(process.pid or 0, "-")
        return "closed its connection" if code is None else ended(code)


class WorkerHost(Host):
    """Calls tools and environments in `count` processes, which start when they are first needed.

    ConfigError where another process cannot import one of them. `close` ends the processes, as does the end of this
    one however it ends.
    """

    def __init__(
        self,
        config: GRPOConfig,
        functions: Functions,
        factories: Factories,
        scores: Collection[str] | None,
        count: int,
    ) -> None:
        super().__init__(config, functions, factories, scores)
        self.slots = [_Slot() for _ in range(count)]
        self.load = Load(
            {name: _located(function) for name, function in functions.items()},
            {name: _located(factory) for name, factory in factories.items()},
            self.limits,
        )
        self._numbers: weakref.WeakKeyDictionary[Episode, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()
        self._packed: dict[int, tuple[Any, int, bytes]] = {}
        self.guards: list[Guard] = []
        weakref.finalize(self, _stop_all, self.slots, self.guards, os.getpid())

    def begin(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._slot_of(task.episode).queue.append(task)
        self._hand_out()

    def work(self, wait: bool) -> None:
        if not any(slot.task for slot in self.slots):
            return
        with self._abandoning():
            self._wait(wait)
        self._hand_out()

    def abandon(self) -> None:
        for slot in self.slots:
            slot.queue.clear()
            if slot.task is not None:
                self._lose(slot, "the run was stopping")
        self._packed.clear()

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Give up what is under way where something is raised: a call that goes on would answer into the next one."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def _hand_out(self) -> None:
        with self._abandoning():
            for slot in self.slots:
                self._give(slot)
        if not any(slot.task for slot in self.slots):
            self._packed.clear()

    def forget(self, episode: Episode) -> None:
        if episode.place is not None:
            episode.place.conversations -= 1
            episode.place.environments.discard(episode)
            episode.place = None

    def close(self) -> None:
        try:
            self.close_episodes()
        except ToolError as error:
            log.warning("%s", error)
        finally:
            _stop_all(self.slots, self.guards, os.getpid())

    def _slot_of(self, episode: Episode) -> _Slot:
        if episode.place is None:
            slot = min(self.slots, key=lambda slot: slot.conversations)
            slot.conversations += 1
            episode.place, self._numbers[episode] = slot, next(self._next)
        found: _Slot = episode.place
        return found

    def _guard(self) -> Guard:
        if not self.guards:
            self.guards.append(Guard())
        return self.guards[0]

    def _give(self, slot: _Slot) -> None:
        """Hand a worker without a call the next one that is to be made."""
        if (
            slot.task is None
            and slot.queue
            and slot.process is not None
            and slot.process.exitcode is not None
        ):
            self._lose(slot, f"its worker process {slot.stop()} while it waited for calls")
        while slot.task is None and slot.queue:
            task = slot.queue.popleft()
            if not self.due(task):
                task.finished = True
                continue
            slot.task = task
            if slot.process is None:
                slot.start(self.load, self._guard())
        if slot.task is not None and slot.ready and not slot.since:
            self._send(slot, slot.task)

    def _send(self, slot: _Slot, task: Task) -> None:
        key = id(task.arguments)
        if (
            key not in self._packed
        ):  # the conversations of a group begin with one row, which stays alive for its id
            self._packed[key] = task.arguments, next(self._next), _packed(task)
        row: tuple[int, bool] | None = None
        _, number, body = self._packed[key]
        if task.what == "reset":
            row = number, not slot.environments  # where none is held, the worker forgets the rows of others
            if not slot.environments:
                slot.rows.clear()
            if number in slot.rows:
                body = b""
            slot.rows.add(number)
            slot.environments.add(task.episode)
        call = pickle.dumps((self._numbers[task.episode], task.what, task.name, row, body))
        slot.out = memoryview(LENGTH.pack(len(call)) + call)
        slot.since = time.monotonic()

    def _wait(self, wait: bool) -> None:
        """Take what workers have to say; with `wait` wait until one can be written to, has answered or has ended, or a
        deadline has passed."""
        busy = [slot for slot in self.slots if slot.task is not None and slot.process is not None]
        now = time.monotonic()
        first = min(self._deadline(slot) for slot in busy)
        with selectors.DefaultSelector() as selector:
            for slot in busy:
                assert slot.connection is not None and slot.process is not None
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if slot.out else 0)
                selector.register(slot.connection, events, slot)
                selector.register(slot.process.sentinel, selectors.EVENT_READ, slot)
            found = {key.data for key, _ in selector.select(max(0.0, first - now) if wait else 0)}
        for slot in busy:
            if slot in found:
                self._exchange(slot)
            if slot.task is not None and slot.process is not None and time.monotonic() > self._deadline(slot):
                self._late(slot)

    def _deadline(self, slot: _Slot) -> float:
        if slot.ready and not slot.since:  # the call is not sent yet
            return float("inf")
        return slot.since + (self.timeout if slot.ready else START_LIMIT)

    def _exchange(self, slot: _Slot) -> None:
        """Write and read what there is to; note that a worker has ended."""
        assert slot.connection is not None and slot.process is not None
        over = slot.process.exitcode is not None  # before reading: what it sent before it ended counts
        try:
            if slot.out:
                slot.out = slot.out[slot.connection.send(slot.out) :]
        except BlockingIOError:
            pass
        except OSError:
            over = True
        try:
            while data := slot.connection.recv(READ):
                slot.read += data
                if self._frame(slot):
                    return
            over = True
        except BlockingIOError:
            pass
        except OSError:
            over = True
        if over:
            self._died(slot)

    def _frame(self, slot: _Slot) -> bool:
        """Take a frame that has arrived in full; whether there was one."""
        if len(slot.read) < LENGTH.size:
            return False
        (length,) = LENGTH.unpack_from(slot.read)
        if length > most_bytes(self.limits):
            self._died(slot, f"sent {length} bytes, which is no answer")
            return True
        if len(slot.read) < LENGTH.size + length:
            return False
        body = bytes(slot.read[LENGTH.size :])
        slot.read = bytearray()
        if not slot.ready:
            if body:
                raise ToolError(
                    f"a worker process cannot import the tools of the run: {body.decode(errors='replace')}; or set "
                    "rollout.environment_workers=0"
                )
            slot.ready, slot.since = True, 0.0
            return True
        try:
            answer = unpacked_answer(body, self.limits)
        except ValueError as error:
            self._died(slot, f"sent what is no answer ({error})")
            return True
        task, slot.task, slot.since = slot.task, None, 0.0
        assert task is not None
        if task.what == "close" or answer.gone is not None:
            slot.environments.discard(task.episode)
        self.settle(task, answer)
        return True

    def _died(self, slot: _Slot, how: str = "") -> None:
        task, ready = slot.task, slot.ready
        assert task is not None
        how = how or _how(slot)
        self._lose(slot, f"its worker process {how} in {task} of {task.episode.uid}")
        if not ready:
            raise ToolError(
                f"a worker process {how} while it started or imported the tools of the run; what it wrote stands above"
            )
        self.settle(task, Answer(died=how))

    def _late(self, slot: _Slot) -> None:
        task, ready = slot.task, slot.ready
        assert task is not None
        uid = task.episode.uid
        self._lose(
            slot, f"its worker process was ended, for {task} of {uid} had no answer after {self.timeout:g} s"
        )
        if not ready:
            raise ToolError(
                f"a worker process has not imported the tools of the run within {START_LIMIT:g} s"
            )
        self.settle(task, Answer(late=True))

    def _lose(self, slot: _Slot, why: str) -> None:
        """Kill a worker; the environments that it held are gone."""
        slot.stop()
        slot.task, slot.since = None, 0.0
        for episode in slot.environments:
            episode.lost = episode.lost or why
        slot.environments.clear()


def _how(slot: _Slot) -> str:
    """Describe how a worker ended; it may be a moment from the closed connection to the end."""
    if slot.process is not None:
        slot.process.join(0.5)
    return slot.stop()


def _located(what: Any) -> tuple[str, str | None]:
    address = address_of(what)
    if address is None:
        name = getattr(what, "__qualname__", repr(what))
        raise ConfigError(
            f"rollout.environment_workers > 0: {name} cannot be imported by a worker process, for a lambda, a closure, "
            "or what a notebook or the script that runs defines exists in this process alone; put it into a file of "
            "its own, or set rollout.environment_workers=0"
        )
    return address, digest_of(address)


def _packed(task: Task) -> bytes:
    try:
        return pickle.dumps(dict(task.arguments), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        name = next((n for n, value in task.arguments.items() if not _can_be_sent(value)), "?")
        raise ToolError(
            f"{task.episode.uid}: the column {name!r} cannot be sent to a worker process ({type(error).__name__}: "
            f"{error}); let reset name the columns that it needs, or set rollout.environment_workers=0"
        ) from error


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return False
    return True


def _stop_all(slots: Sequence[_Slot], guards: list[Guard], owner: int) -> None:
    """Kill all workers; not in a fork of the process that started them."""
    if os.getpid() == owner:
        for slot in slots:
            slot.stop()
            slot.environments.clear()
        while guards:
            guards.pop().close()
