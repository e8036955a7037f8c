"""Served vLLM as a `RolloutEngine`: one or many servers, with the same seeds and samples whichever of them answers.

Requests carry their seeds, so samples do not depend on the server or the batch, except for rounding in the last bits.
Checks of answers and of a row's size are those of the in-process engine (`vllm/requests.py`). `pool.py` chooses servers
and fails over, `transfer.py` carries weights.

Each trainer process sends its own prompts to all servers. Only the first sends weights, and has servers sleep and wake
that share the learner's GPUs. The others learn from it what arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError, DataError, EngineError, GuardStop
from mm_grpo.processors.base import Processor
from mm_grpo.rollout.engine import Digest, ReplicaLost, Request, RolloutEngine
from mm_grpo.rollout.served.client import ServerClient, ServerError, ServerRefused, ServerUnreachable, wait
from mm_grpo.rollout.served.pool import Server, ServerPool
from mm_grpo.rollout.served.protocol import MASKED, ServerLimits, accounts, adapter_layers, key_refused
from mm_grpo.rollout.served.transfer import ServedTransfer
from mm_grpo.rollout.vllm.requests import (
    EngineAnswer,
    EngineRequest,
    GroupStream,
    RequestFormat,
    request_groups,
)
from mm_grpo.rollout.weights import digest, missing_tensors
from mm_grpo.types import Completion, Prompt


class ServedEngine(RolloutEngine):
    """vLLM servers as an engine. `transfer` is None in processes other than the first.

    It samples after the first `update_weights`. Several threads may use it at once. Raises ConfigError if no server
    answers, or one lacks what a run needs.
    """

    remote = True

    def __init__(
        self,
        clients: Sequence[ServerClient],
        transfer: ServedTransfer | None,
        processor: Processor,
        *,
        limits: ServerLimits,
        max_media: Mapping[str, int],
        ranks: Ranks | None = None,
    ) -> None:
        self.transfer, self.ranks = transfer, ranks or Ranks()
        if transfer is not None:
            transfer.shared = limits.sleep_level > 0
        self.version = 0
        self._current = False  # True once the servers have this run's weights
        self._lock = threading.RLock()  # of `transfer` and `_sent_digests`
        self._sent_digests: dict[str, str] = {}
        self._reported_losses = 0
        self.requests = RequestFormat(
            processor,
            limits.max_model_len,
            max_media,
            mask={str(token): MASKED for token in sorted(processor.media_token_ids)},
            params={"detokenize": False},
            version=lambda: self.version,
        )
        self.pool = ServerPool(clients, limits, bring_up=None if transfer is None else self._bring_up)
        self.pool.connect()

    def stream(self) -> ServedStream:
        """Open a stream of requests; first lose the servers that are gone."""
        self._require_current()
        self.pool.check()
        return ServedStream(self)

    @property
    def holds_weights(self) -> bool:
        """Return True when the ready servers hold the newest weights; one that joins is sent them."""
        return self._current

    @property
    def replicas(self) -> tuple[ServedReplica, ...]:
        """Return the ready servers, each as an engine for checks."""
        return tuple(ServedReplica(self, server) for server in self.pool.ready())

    def metrics(self) -> dict[str, float]:
        """Return the number of ready servers, and of servers lost since the last call."""
        before, self._reported_losses = self._reported_losses, self.pool.losses
        return {"served/ready": len(self.pool.ready()), "served/losses": self._reported_losses - before}

    @property
    def sentence(self) -> str:
        level = self.pool.limits.sleep_level
        sleep = f"; they sleep while the learner works (level {level})" if level else ""
        return f"vLLM servers (rollout.server.urls): {', '.join(s.url for s in self.pool.servers)}{sleep}"

    def adapter_layers(self, layers: Iterable[str]) -> frozenset[str]:
        """Return the layers for which every server that answers has LoRA layers. Collective if there are any."""
        supported, limits = frozenset(layers), self.pool.limits
        if not supported:
            return supported
        with self.ranks.fail_together("adapters"):
            for server in self.pool.answering() if self.transfer is not None else ():
                supported &= adapter_layers(server.client, supported, limits.lora_rank, limits.timeout)
        return self.ranks.broadcast(supported, "adapters")

    @property
    def base_replaced(self) -> bool:
        """Return True if a server was sent weights since its start, as by an earlier run. Collective."""
        replaced, timeout = False, self.pool.limits.timeout
        with self.ranks.fail_together("the base"):
            for server in self.pool.answering() if self.transfer is not None else ():
                replaced |= any(account.replaced for account in accounts(server.client, timeout))
        return self.ranks.broadcast(replaced, "the base")

    def use_adapters(self, layers: frozenset[str]) -> None:
        """Send requests to the servers' adapter from now on if there are `layers`, else to the model."""
        self.pool.adapted = bool(layers)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        """Send `tensors`, whole layers, to all servers as weights number `version`. Collective.

        Wakes them. Returns their digests as the servers' workers received them. A server that fails is left out, and
        brought up when it is back. Raises GuardStop if one received something else, EngineError if none is left.
        """
        self._make_room()
        result: Any = None
        with self.ranks.fail_together("weights"):
            try:
                if self.transfer is not None:
                    result = self._send(self.transfer, tensors, version)
            finally:  # all processes take the tensors: those of a sharded model are gathered by all
                for _ in tensors:
                    pass
        received, name, urls = self.ranks.broadcast(result, "weights")
        if self.transfer is None:
            with self.pool.update(name):
                for server in self.pool.answering():
                    if server.url in urls:
                        self.pool.admit(server)
                    else:
                        self.pool.lose(server, f"the first process could not send it version {version}")
        self.version, self._current = version, True
        return dict(received)

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        if not token_ids:
            return []
        self._require_current()
        answer = self.pool.submit(self.requests.scored(prompt, token_ids))
        return self.requests.scores(prompt, token_ids, answer_of(answer, prompt.uid))

    def sleep(self) -> None:
        """Have servers on the learner's GPUs free their memory, at level 2 without a copy. Collective."""
        level = self.pool.limits.sleep_level
        if not level or self.pool.asleep:
            return
        self.ranks.broadcast(None, "sleep")  # until every process has its answers
        with self.ranks.fail_together("sleep"), self._lock:
            self.pool.asleep = True
            if self.transfer is not None:
                self.pool.sleep()
        self._current = self._current and level < 2

    def wake(self) -> None:
        """Have sleeping servers take the memory back, as `update_weights` does. Collective."""
        if self.pool.asleep:
            self._make_room()
            with self.ranks.fail_together("wake"):
                if self.transfer is not None:
                    self.pool.wake()
            self.pool.asleep = False

    def close(self) -> None:
        """Disconnect from the servers, which keep running, awake."""
        self.pool.close()
        if self.transfer is not None:
            if self.pool.asleep:
                self.pool.wake()
            self.transfer.close()
        for server in self.pool.servers:
            server.client.close()
        self._current = False

    def _send(
        self, transfer: ServedTransfer, tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> tuple[dict[str, str], str, list[str]]:
        """Return the digests of what was sent, the weights' name there, and the urls of servers that hold them."""
        if self.pool.closed:
            raise EngineError("this engine was closed, and takes no weights; make a new trainer")
        name = transfer.weights_name(version)
        with self._lock, self.pool.update(name):
            targets = self.pool.ready() if self._current else self.pool.answering()
            digests: dict[str, str] = {}
            pairs = self._with_digests(tensors, digests)
            try:
                outcome = transfer.send([server.client for server in targets], pairs, version)
            except BaseException:
                self._current = False
                raise
            self._sent_digests |= digests
            self.version, self._current = version, True
            urls: list[str] = []
            for server in targets:
                received = outcome[server.url]
                if isinstance(received, Exception):
                    reason = received.reason if isinstance(received, ServerError) else str(received)
                    self.pool.lose(server, f"in the update to version {version}: {reason}")
                else:
                    self._admit(server, digests, received)
                    urls.append(server.url)
        if not urls:
            self.pool.wait_ready()  # a server that comes back is sent all
            urls = [server.url for server in self.pool.ready()]
        return digests, name, urls

    def _with_digests(
        self, tensors: Iterable[tuple[str, Tensor]], digests: dict[str, str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors on, and put their digests into `digests`."""
        ledger_digests = getattr(tensors, "digests", None)  # a ledger's transfer has them already
        for name, tensor in tensors:
            digests[name] = digest(tensor) if ledger_digests is None else ledger_digests[name]
            yield name, tensor

    def _bring_up(self, server: Server) -> None:
        """Send all weights of this run to a server that joins."""
        transfer = self.transfer
        assert transfer is not None
        with self._lock:
            # the transfer keeps a mixture of two versions, or the memory is the learner's
            if not self._current or self.pool.asleep:
                raise EngineError("the last update was not sent whole, or the servers sleep")
            received = transfer.catch_up(server.client)
            if isinstance(received, Exception):
                raise received
            self._admit(server, self._sent_digests, received)

    def _admit(self, server: Server, sent_digests: Digest, received: Digest) -> None:
        """Send requests to a server that has new weights. GuardStop if it received others than were sent."""
        if (message := missing_tensors(sent_digests, received)) is not None:
            raise GuardStop(f"weight sync with {server.url}: {message}")
        self.pool.admit(server)

    def _make_room(self) -> None:
        """Free memory that torch keeps unused, on all processes: servers that wake take it from the device."""
        if self.pool.asleep:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.ranks.broadcast(None, "memory")

    def _require_current(self) -> None:
        if not self._current:
            raise EngineError(
                "the servers do not hold this trainer's weights; call update_weights with every tensor first"
            )
        if self.pool.asleep:
            raise EngineError("the servers sleep; call wake on every process first")


@dataclass(frozen=True)
class ServedReplica:
    """Server as an engine for checks: `score` and `generate` raise ReplicaLost if it fails."""

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
        self.engine._require_current()
        try:
            return answer_of(self.engine.pool.submit_to(self.server, work), work.uid)
        except ServerUnreachable as error:
            raise ReplicaLost(str(error)) from error


class ServedStream(GroupStream):
    """Stream of a `ServedEngine`. Its exit aborts the requests that are left after an error.

    Raises DataError for a row that does not fit, GuardStop when a server ran other tokens than the learner's,
    EngineError when no server is left.
    """

    def __init__(self, engine: ServedEngine) -> None:
        super().__init__(engine.requests)
        self.pool = engine.pool

    def send(self, request: EngineRequest) -> Future[EngineAnswer]:
        return self.pool.submit(request)

    def step(self) -> list[tuple[int, Completion]]:
        """Return the answers that have come. Waits for the first."""
        if not self.running:
            return []
        futures.wait(self.running, return_when=futures.FIRST_COMPLETED)
        answers = [
            (future, group[0].prompt.uid) for future, (_, group) in self.running.items() if future.done()
        ]
        return [pair for future, uid in answers for pair in self.finish(future, answer_of(future, uid))]

    def close(self) -> None:
        running, self.running = self.running, {}
        for future in running:
            future.cancel()


def answer_of(future: Future[EngineAnswer], uid: str) -> EngineAnswer:
    """Wait for the answer to a row's request. Raises ConfigError or DataError for what a server refuses."""
    try:
        return wait(future)
    except ServerRefused as error:
        if error.status in (401, 403):
            raise ConfigError(key_refused(error.url, error.reason)) from error
        raise DataError(f"{uid}: vLLM refuses the prompt: {error}") from error
