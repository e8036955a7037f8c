"""Servers that take weights as vLLM's workers do, in this process: the receivers are ours, vLLM's part is a dict.

`FakeServer` stands for client and server in one. It knows vLLM's rules (an update begins once; one that fails is over)
and sends every body through JSON. Faults are functions by endpoint, which run in place of it or before it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mm_grpo.rollout.served.client import ServerRefused, ServerUnreachable
from mm_grpo.rollout.served.plugin_engines import RECEIVERS, Account


class FakeModel:
    """Keeps what `load_weights` brings, once `finalize` has run; names that begin with `strange` are none of its."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.waiting: dict[str, Tensor] = {}

    def named_parameters(self, remove_duplicate: bool = False) -> Iterable[tuple[str, Tensor]]:
        return self.weights.items()

    def named_modules(self) -> list[tuple[str, None]]:
        return [(name.rpartition(".")[0], None) for name in self.weights]

    def get_submodule(self, name: str) -> None:
        return None

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name.startswith("strange"):
                raise ValueError(f"There is no module or parameter named '{name}'")
            self.waiting[name] = tensor.clone()


def worker(kind: str, rank: int, world: int) -> Any:
    """A receiver of `kind` as vLLM's worker number `rank` of `world` holds it."""

    class Worker(RECEIVERS[kind]):  # type: ignore[misc]
        def __init__(self) -> None:
            self.model, self.model_config, self.vllm_config = FakeModel(), None, None
            self.parallel_config = SimpleNamespace(data_parallel_rank=0, world_size=world, rank=rank)
            self.device, self.account = torch.device("cpu"), Account()
            self.active = False

        def _config(self) -> Any:
            from contextlib import nullcontext

            return nullcontext()

        def _initialize(self) -> None:
            assert not self.model.waiting, "layers still wait for tensors of an update that was given up"

        def _discard(self) -> None:
            self.model.waiting = {}

        def _finalize(self) -> None:
            self.model.weights |= self.model.waiting
            self.model.waiting = {}

    return Worker()


class FakeServer:
    """A server at `url` with `workers` workers; `calls` are the endpoints that were asked, in order."""

    def __init__(self, url: str = "http://fake:1", kind: str = "file", workers: int = 1) -> None:
        self.url, self.kind, self.count = url, kind, workers
        self.faults: dict[str, Callable[[Any], Any]] = {}
        self.calls: list[str] = []
        self.versions: list[str] = []
        self.caches: list[str] = []
        self.paused = False
        self.dead = False
        self.restart()

    def restart(self) -> None:
        """New workers, with no weights, in no group."""
        self.workers = [worker(self.kind, rank, self.count) for rank in range(self.count)]
        self.dead = self.paused = False

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.workers[0].model.weights)

    def call(
        self,
        path: str,
        json: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        method: str = "POST",
    ) -> Any:
        if self.dead:
            raise ServerUnreachable(self.url, "no connection")
        self.calls.append(path)
        body = None if json is None else _through_json(json)
        if path in self.faults:
            replaced = self.faults[path](body)
            if replaced is not None:
                return replaced
        try:
            return _through_json(self._answer(path.removeprefix("/"), body, params or {}))
        except (ServerUnreachable, ServerRefused):
            raise
        except Exception as error:
            raise ServerUnreachable(self.url, f"{path} was answered with HTTP 500: {error}") from error

    def close(self) -> None:
        pass

    def _answer(self, path: str, body: Any, params: Mapping[str, Any]) -> Any:
        if path == "pause":
            self.paused = True
        elif path == "resume":
            self.paused = False
        elif path == "get_world_size":
            return {"world_size": self.count}
        elif path == "collective_rpc":
            assert body == {"method": "mm_grpo_received"}
            return {"results": [each.account.as_json() for each in self.workers]}
        elif path == "init_weight_transfer_engine":
            self._on_workers(lambda w: w.init_transfer_engine(w.init_info_cls(**body["init_info"])))
        elif path == "start_weight_update":
            self._on_workers(_start)
        elif path == "update_weights":
            self._on_workers(lambda w: _update(w, body["update_info"]))
        elif path == "finish_weight_update":
            self._on_workers(_finish)
            self.versions.append(body["weight_version"])
        elif path == "reset_prefix_cache":
            assert params == {"reset_running_requests": "true"}
            self.caches.append("prefix")
            return {"success": True}
        elif path == "reset_encoder_cache":
            self.caches.append("encoder")
        else:
            raise ServerRefused(self.url, f"{path}: HTTP 404", 404)
        return None

    def _on_workers(self, work: Callable[[Any], None]) -> None:
        """All at once, as the processes of a tensor-parallel group."""
        errors: list[Exception] = []

        def one(each: Any) -> None:
            try:
                work(each)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(each,)) for each in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def _start(each: Any) -> None:
    if each.active:
        raise RuntimeError("start_weight_update called while a weight update is already active")
    each.start_weight_update()
    each.active = True


def _update(each: Any, info: Mapping[str, Any]) -> None:
    if not each.active:
        raise RuntimeError("start_weight_update must be called before update_weights")
    try:
        each.receive_weights(each.update_info_cls(**info))
    except BaseException:
        each.active = False
        raise


def _finish(each: Any) -> None:
    if not each.active:
        raise RuntimeError("finish_weight_update called without a matching start_weight_update")
    each.finish_weight_update()
    each.active = False


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))
