"""mm_grpo's plugin in vLLM's workers: the receiving end of a weight transfer, and an account of what was received.

    vllm serve MODEL --weight-transfer-config '{"backend": "mm_grpo_file"}' \\
        --worker-extension-cls mm_grpo.rollout.served.plugin.WorkerExtension

Each worker imports the module of its extension before it makes its transfer engine, so that import is all that the
backends need to be known: no entry point, which would run in every vLLM of the machine. mm_grpo has to be importable
where the server runs. `transfer.py` is the other end.

`Receiver` is what vLLM calls a weight-transfer engine, without its base class, which `register` adds (so this file
needs no vLLM, and versions that ask more of the class do not matter). Its calls come in this order:

    init_transfer_engine   once, and again for every new group
    start_weight_update    layers begin to wait for their tensors
    update_weights         a chunk; any number of times. Every kind takes files, for servers that joined late
    finish_weight_update   layers are made of what came

`Account` is what the learner asks for afterwards: a digest of each tensor as vLLM's layers hold it, where they can be
read (`vllm/read_back.py`), else as it arrived here. What vLLM itself reports hashes its fused parameters, and on a CPU
empty ones. vLLM drops its adapters behind `finish_weight_update`: so factors (`vllm/adapters.py`) are kept here, and
put in when the account is asked for, before a server goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from mm_grpo.rollout.served.broadcast import BroadcastGroup, Tensors, received
from mm_grpo.rollout.served.protocol import WorkerAccount, model_sizes
from mm_grpo.rollout.vllm import adapters
from mm_grpo.rollout.vllm.read_back import ReadBack, quiet_reload

EXTENSION = "mm_grpo.rollout.served.plugin.WorkerExtension"


class Account(WorkerAccount):
    """A worker's own account, with what it needs to keep it: `factors` are those of the run's adapter, `put` whether
    vLLM's layers have them."""

    read_back: Any = Field(default_factory=ReadBack, exclude=True)
    factors: dict[str, Any] = Field(default_factory=dict, exclude=True)
    put: bool = Field(default=True, exclude=True)

    def begin(self) -> None:
        self.digests, self.finished = {}, False
        self.read_back.begin()

    def note(self, name: str, tensor: Tensor) -> None:
        self.digests[name] = ""
        if adapters.is_factor(name):
            self.factors[name] = tensor.clone()
        else:
            self.read_back.note(name, tensor)

    def end(self, model: torch.nn.Module) -> None:
        self.digests |= self.read_back.digests(model)
        self.finished, self.put = True, not self.factors

    def put_factors(self, model: torch.nn.Module) -> None:
        """Put the adapter in where an update has dropped it."""
        if self.finished and not self.put:
            adapters.put(model, self.factors)
            held = adapters.read_back(model, self.factors)
            self.digests |= {name: held[name] for name in self.digests.keys() & held.keys()}
            self.put = True


@dataclass
class InitInfo:
    """Arguments of `/init_weight_transfer_engine`: `group` is the learner's name for what is joined, the others the
    rendezvous of a group in which the learner is rank 0."""

    group: str = ""
    host: str = ""
    port: int | None = None
    world_size: int = 0
    timeout: float = 60.0


@dataclass
class UpdateInfo:
    """One chunk: a file (`path`, of its tensors `names`), or what a broadcast holds (`tensors`)."""

    path: str | None = None
    names: Sequence[str] = ()
    tensors: Tensors | None = None


class Receiver:
    """A weight-transfer engine of vLLM's, which takes chunks out of files."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    kind = "file"

    # set by vLLM's base class
    model: Any
    model_config: Any
    vllm_config: Any
    parallel_config: Any
    device: torch.device
    account: Account

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._has_joined(init_info.group)

    def _has_joined(self, group: str) -> None:
        """Keep the name of what was joined; the adapter of an earlier run is none of this one."""
        self.account.group, self.account.factors = group, {}

    def start_weight_update(self) -> None:
        if not self.account.finished:  # given up half-way: layers that wait would count their tensors twice
            self._discard()
            self._finalize()
        self.account.begin()
        self._initialize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if (update_info.path is None) == (update_info.tensors is None):
            raise ValueError("an update has either a path or tensors")
        tensors = self._from_file(update_info) if update_info.path else self._from_group(update_info)
        self.model.load_weights(self._noted(tensors))

    def finish_weight_update(self) -> None:
        self._finalize()
        self.account.end(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""

    # parts -----------------------------------------------------------------------------------

    def _noted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.account.note(name, tensor)
            if not adapters.is_factor(name):
                yield name, tensor

    def _from_file(self, info: UpdateInfo) -> Iterator[tuple[str, Tensor]]:
        from safetensors import safe_open

        assert info.path is not None
        with safe_open(info.path, "pt", device=str(self.device)) as file:
            for name in info.names:
                tensor = file.get_tensor(name)
                # a layer may wait for its other tensors after the file is gone
                yield name, tensor.clone() if self.device.type == "cpu" else tensor

    def _from_group(self, info: UpdateInfo) -> Iterator[tuple[str, Tensor]]:
        raise ValueError(f"backend 'mm_grpo_{self.kind}' takes files alone")

    def _initialize(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def _discard(self) -> None:
        """Drop what layers have kept: of another model's it does not fit, and would fail at every start."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with quiet_reload():
            finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]


class GlooReceiver(Receiver):
    """Chunks broadcast over gloo, through the host's memory; files too."""

    kind = "gloo"
    _group: BroadcastGroup | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if init_info.port is None:
            return super().init_transfer_engine(init_info)
        self.shutdown()
        parallel = self.parallel_config
        place = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = BroadcastGroup(
            self.kind,
            init_info.host,
            init_info.port,
            rank=1 + place,
            size=init_info.world_size,
            timeout=init_info.timeout,
        )
        self._has_joined(init_info.group)

    def shutdown(self) -> None:
        group, self._group = self._group, None
        self.account.group = ""
        if group is not None:
            group.abort()

    def _from_group(self, info: UpdateInfo) -> Iterator[tuple[str, Tensor]]:
        if self._group is None:
            raise ValueError("this worker is in no group; init_weight_transfer_engine comes first")
        try:
            for name, tensor in received(info.tensors or [], self._group):
                yield name, tensor.to(self.device)
        except BaseException:  # where the model refuses one, those that follow it are not waited for
            self.shutdown()
            raise


class NcclReceiver(GlooReceiver):
    """Chunks broadcast over NCCL, from the learner's GPU to the worker's."""

    kind = "nccl"


RECEIVERS: dict[str, type[Receiver]] = {c.kind: c for c in (Receiver, GlooReceiver, NcclReceiver)}
BACKENDS = {kind: f"mm_grpo_{kind}" for kind in RECEIVERS}
"""vLLM's name of each kind of transfer, for `--weight-transfer-config`."""


# in a worker of vLLM's -----------------------------------------------------------------------


class WorkerExtension:
    """Methods of vLLM's workers, called by name through /collective_rpc."""

    account = Account()  # of this process's worker

    # of vLLM's worker
    vllm_config: Any
    get_model: Callable[[], torch.nn.Module]

    def mm_grpo_received(self) -> dict[str, Any]:
        """The account of this process's worker, for JSON, once the adapter of its run is in vLLM's layers."""
        WorkerExtension.account.put_factors(self.get_model())
        return WorkerExtension.account.model_dump()

    def mm_grpo_adapter_layers(self, asked: str) -> list[str]:
        """Those of the learner's `layers` that vLLM has LoRA layers of at least `rank` for; asked for in JSON."""
        layers, rank = json.loads(asked)
        lora = self.vllm_config.lora_config
        taken = rank <= lora.max_lora_rank if lora is not None else False
        return sorted(adapters.supported_layers(self.get_model(), layers)) if taken else []


def register() -> None:
    """Make the backends known to this process's vLLM, and today's names of weights; again does nothing."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    for kind, receiver in RECEIVERS.items():
        if BACKENDS[kind] not in Factory._registry:
            engine = type(receiver.__name__, (_Accounted, receiver, WeightTransferEngine), {})
            Factory.register_engine(BACKENDS[kind], engine)


class _Accounted:
    """A receiver that keeps its books in this process's account."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        from mm_grpo.rollout.vllm.weight_names import teach_names

        super().__init__(config, vllm_config, device, model)  # type: ignore[call-arg]
        hf_config = vllm_config.model_config.hf_config
        teach_names(hf_config)
        mode, size = (
            str(vllm_config.model_config.logprobs_mode),
            vllm_config.parallel_config.tensor_parallel_size,
        )
        back = ReadBack(vllm_config.parallel_config.rank % size, size)
        self.account = Account(model=model_sizes(hf_config), logprobs_mode=mode, read_back=back)
        WorkerExtension.account = self.account


if "vllm.v1.worker.worker_base" in sys.modules:  # a worker of vLLM's imports its extension
    register()
