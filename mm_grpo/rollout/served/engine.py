"""Served vLLM as a `RolloutEngine`: one or many servers, the same seeds and samples whichever of them answers.

Requests carry their seeds, so samples do not depend on which server answers, or in what company (but for the last bits:
a batch of another size may round another way). What is compared, and what a row has to fit, is as in the in-process
engine (`vllm/requests.py`); `pool.py` chooses servers and fails over, `transfer.py` carries weights.

Of several trainer processes each asks every server for the prompts of its own; the first alone sends weights, and the
others take from it what arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError, DataError, EngineError, GuardStop
from mm_grpo.rollout.engine import Follows, ReplicaLost, Request, RequestStream, RolloutEngine
from mm_grpo.rollout.served.client import ServerClient, ServerError, ServerRefused, ServerUnreachable, wait
from mm_grpo.rollout.served.pool import Server, ServerPool
from mm_grpo.rollout.served.protocol import MASKED, Limits, adapter_layers, key_refused
from mm_grpo.rollout.vllm.requests import EngineAnswer, EngineRequest, RequestFormat, request_groups
from mm_grpo.rollout.weights import digest, missing_tensors
from mm_grpo.types import Completion, Prompt

if TYPE_CHECKING:
    from torch import Tensor

    from mm_grpo.processors.base import Processor
    from mm_grpo.rollout.engine import Digest
    from mm_grpo.rollout.served.transfer import ServedTransfer


class ServedEngine(RolloutEngine):
    """vLLM servers as an engine. `transfer` is None in processes other than the first.

    Before the first `update_weights` it does not sample. Several threads may use it at once. Raises ConfigError where
    no server answers, or one lacks what a run needs.
    """

    remote = True

    def __init__(
        self,
        clients: Sequence[ServerClient],
        transfer: ServedTransfer | None,
        processor: Processor,
        *,
        limits: Limits,
        max_images: int,
        ranks: Ranks | None = None,
    ) -> None:
        self.transfer, self.ranks = transfer, ranks or Ranks()
        self.version = 0
        self._current = False  # once the servers have this run's weights
        self._lock = threading.RLock()  # of the transfer, and of what it is to send
        self._sent: dict[str, str] = {}
        self._counted = 0
        self.requests = RequestFormat(
            processor,
            limits.max_model_len,
            max_images,
            mask={str(token): MASKED for token in sorted(processor.media_token_ids)},
            params={"detokenize": False},
            version=lambda: self.version,
        )
        self.pool = ServerPool(clients, limits, bring_up=None if transfer is None else self._bring_up)
        self.pool.connect()

    # the protocol ----------------------------------------------------------------------------

    def stream(self) -> ServedStream:
        """Requests that are answered one by one, as they end."""
        self._require_current()
        self.pool.check()
        return ServedStream(self)

    @property
    def holds_weights(self) -> bool:
        """True when the servers that are ready hold what was sent last; one that joins is brought up to it."""
        return self._current

    @property
    def replicas(self) -> tuple[ServedReplica, ...]:
        """The servers that are ready, each as an engine of its own, for checks that every one of them has to pass."""
        return tuple(ServedReplica(self, server) for server in self.pool.ready())

    def metrics(self) -> dict[str, float]:
        """Servers that are ready, and how many were lost since the last call."""
        before, self._counted = self._counted, self.pool.losses
        return {"served/ready": len(self.pool.ready()), "served/losses": self._counted - before}

    @property
    def sentence(self) -> str:
        """The servers, for the log."""
        return f"vLLM servers (rollout.server.urls): {', '.join(server.url for server in self.pool.servers)}"

    def adapter_layers(self, layers: Iterable[str]) -> frozenset[str]:
        """Return the layers for which every server that answers has LoRA layers. Collective if there are any."""
        supported, limits = frozenset(layers), self.pool.limits
        if not supported:
            return supported
        with self.ranks.fail_together("adapters"):
            for server in self.pool.answering() if self.transfer is not None else ():
                supported &= adapter_layers(server.client, supported, limits.lora_rank, limits.timeout)
        return self.ranks.broadcast(supported, "adapters")

    def use_adapters(self, layers: frozenset[str]) -> None:
        """Send requests to the servers' adapter from now on if there are `layers`, else to the model."""
        self.pool.adapted = bool(layers)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        """Bring `tensors`, whole layers, to all servers as weights number `version`; collective.

        Returns their digests as the servers' workers received them. A server that fails is left out, and brought up
        when it is back. Raises GuardStop where one received something else, EngineError where none is left.
        """
        found: Any = None
        with self.ranks.fail_together("weights"):
            if self.transfer is not None:
                found = self._send(self.transfer, tensors, version)
            else:
                for _ in tensors:
                    pass
        received, name, urls = self.ranks.broadcast(found, "weights")
        if self.transfer is None:
            with self.pool.update(name):
                for server in self.pool.answering():
                    if server.url in urls:
                        self.pool.took(server)
                    else:
                        self.pool.lose(server, f"the first process could not send it version {version}")
        self.version, self._current = version, True
        return dict(received)

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities [T] of `token_ids` after `prompt`, images included: no mask, temperature 1."""
        if not token_ids:
            return []
        self._require_current()
        answer = self.pool.submit(self.requests.scored(prompt, token_ids))
        return self.requests.scores(prompt, token_ids, answer_of(answer, prompt.uid))

    def close(self) -> None:
        """Disconnect from the servers, which go on."""
        self.pool.close()
        if self.transfer is not None:
            self.transfer.close()
        for server in self.pool.servers:
            server.client.close()
        self._current = False

    # weights ---------------------------------------------------------------------------------

    def _send(
        self, transfer: ServedTransfer, tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> tuple[dict[str, str], str, list[str]]:
        """Return what the servers received, the weights' name there, and the urls of those that took them."""
        if self.pool.closed:
            raise EngineError("this engine was closed, and takes no weights; make a new trainer")
        name = transfer.weights_name(version)
        with self._lock, self.pool.update(name):
            targets = self.pool.ready() if self._current else self.pool.answering()
            digests: dict[str, str] = {}
            noted = self._noted(tensors, digests)
            try:
                outcome = transfer.send([server.client for server in targets], noted, version)
            except BaseException:
                self._current = False
                raise
            self._sent |= digests
            self.version, self._current = version, True
            took: list[str] = []
            for server in targets:
                received = outcome[server.url]
                if isinstance(received, Exception):
                    reason = received.reason if isinstance(received, ServerError) else str(received)
                    self.pool.lose(server, f"in the update to version {version}: {reason}")
                else:
                    self._take_in(server, digests, received)
                    took.append(server.url)
        if not took:
            self.pool.wait_ready()  # one that comes back is sent all
            took = [server.url for server in self.pool.ready()]
        return digests, name, took

    def _noted(
        self, tensors: Iterable[tuple[str, Tensor]], digests: dict[str, str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors on, noting their digests."""
        known = getattr(tensors, "digests", None)  # a ledger's transfer has made them already
        for name, tensor in tensors:
            digests[name] = digest(tensor) if known is None else known[name]
            yield name, tensor

    def _bring_up(self, server: Server) -> None:
        """Give a server that joins the weights of this run, all of them."""
        transfer = self.transfer
        assert transfer is not None
        with self._lock:
            if not self._current:  # what the transfer keeps is a mixture of two versions
                raise EngineError("the last update was not sent whole")
            received = transfer.catch_up(server.client)
            if isinstance(received, Exception):
                raise received
            self._take_in(server, self._sent, received)

    def _take_in(self, server: Server, sent: Digest, received: Digest) -> None:
        """Send requests to a server that has taken weights. GuardStop where it received others than were sent."""
        if (message := missing_tensors(sent, received)) is not None:
            raise GuardStop(f"weight sync with {server.url}: {message}")
        self.pool.took(server)

    def _require_current(self) -> None:
        if not self._current:
            raise EngineError(
                "the servers do not hold this trainer's weights; call update_weights with every tensor first"
            )


@dataclass(frozen=True)
class ServedReplica:
    """One server as an engine, for checks: `score` and `generate` raise ReplicaLost where it fails."""

    engine: ServedEngine
    server: Server

    @property
    def name(self) -> str:
        return self.server.url

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        form, groups = self.engine.requests, request_groups(requests)
        pairs = [(group, self._ask(form.sampled(group))) for group in groups]
        return [c for group, answer in pairs for c in form.completions(group, answer)]

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        form = self.engine.requests
        return form.scores(prompt, token_ids, self._ask(form.scored(prompt, token_ids)))

    def _ask(self, work: EngineRequest) -> EngineAnswer:
        try:
            return answer_of(self.engine.pool.submit_to(self.server, work), work.uid)
        except ServerUnreachable as error:
            raise ReplicaLost(str(error)) from error


class ServedStream(RequestStream):
    """Stream of a `ServedEngine`. Its exit gives up the requests that are left after an error.

    Raises DataError for a row that does not fit, GuardStop when a server ran other tokens than the learner's,
    EngineError when no server is left.
    """

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        # by a group's first number
        self.running: dict[int, tuple[Sequence[Request], Future[EngineAnswer]]] = {}
        self._count = 0

    @property
    def unfinished(self) -> int:
        return sum(len(group) for group, _ in self.running.values())

    def add_request(self, request: Request, follows: Follows | None = None) -> int:
        return self._add([request])[0]

    def add_group(self, requests: Sequence[Request]) -> list[int]:
        """Add requests; neighbours of one prompt with consecutive seeds go as one, and are answered together."""
        return [number for group in request_groups(requests) for number in self._add(group)]

    def _add(self, group: Sequence[Request]) -> list[int]:
        """Add requests that go as one (`request_groups`)."""
        first, self._count = self._count, self._count + len(group)
        self.running[first] = group, self.engine.pool.submit(self.engine.requests.sampled(group))
        return list(range(first, self._count))

    def step(self) -> list[tuple[int, Completion]]:
        """The answers that have come; waits for the first."""
        if not self.running:
            return []
        futures.wait([future for _, future in self.running.values()], return_when=futures.FIRST_COMPLETED)
        done: list[tuple[int, Completion]] = []
        for first in [first for first, (_, future) in self.running.items() if future.done()]:
            group, future = self.running.pop(first)
            answer = answer_of(future, group[0].prompt.uid)
            done += enumerate(self.engine.requests.completions(group, answer), first)
        return done

    def close(self) -> None:
        running, self.running = self.running, {}
        for _, future in running.values():
            future.cancel()


def answer_of(future: Future[EngineAnswer], uid: str) -> EngineAnswer:
    """The answer to a row's request; what a server refuses, in this house's errors."""
    try:
        return wait(future)
    except ServerRefused as error:
        if error.status in (401, 403):
            raise ConfigError(key_refused(error.url, error.reason)) from error
        raise DataError(f"{uid}: vLLM refuses the prompt: {error}") from error
