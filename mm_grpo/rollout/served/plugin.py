"""mm_grpo's plugin in vLLM's workers: the receiving end of a weight transfer, and a record of what was received.

A worker imports the module of its extension before it makes its transfer engine, and this import registers the
backends. (An entry point would run in every vLLM of the machine.) `transfer.py` is the other end.

`Receiver` is what vLLM calls a weight-transfer engine, without its base class, which `register` adds, so this file
needs no vLLM. Its calls come in this order:

    init_transfer_engine   once, and again for every new group
    start_weight_update    layers begin to wait for their tensors
    update_weights         a chunk; any number of times. Every kind takes files for servers that joined late
    finish_weight_update   layers are made from their tensors

The learner then asks for the `Account`: a digest of each tensor as vLLM's layers hold it if they can be read
(`vllm/read_back.py`), else as it arrived here.
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

from mm_grpo.rollout.served.broadcast import BroadcastGroup, Tensors, receive
from mm_grpo.rollout.served.protocol import WorkerAccount, model_sizes
from mm_grpo.rollout.vllm import adapters
from mm_grpo.rollout.vllm.model_patches import patch_experts, patch_model
from mm_grpo.rollout.vllm.read_back import ReadBack, quiet_reload

EXTENSION = "mm_grpo.rollout.served.plugin.WorkerExtension"


class Account(WorkerAccount):
    """Record of the tensors that a worker received."""

    read_back: Any = Field(default_factory=ReadBack, exclude=True)
    factors: dict[str, Any] = Field(default_factory=dict, exclude=True)
    """Factors of the run's adapter."""
    put: bool = Field(default=True, exclude=True)
    """vLLM's layers hold the factors."""

    def begin(self) -> None:
        self.digests, self.finished = {}, False
        self.read_back.begin()

    def note(self, name: str, tensor: Tensor) -> None:
        self.digests[name] = ""
        if adapters.is_factor(name):
            self.factors[name] = tensor.clone()
        else:
            self.replaced = True
            self.read_back.note(name, tensor)

    def end(self, model: torch.nn.Module) -> None:
        self.digests |= self.read_back.digests(model)
        self.finished, self.put = True, not self.factors

    def put_factors(self, model: torch.nn.Module) -> None:
        """Put the adapter in again: vLLM drops it after `finish_weight_update`."""
        if self.finished and not self.put:
            adapters.put(model, self.factors)
            digests = adapters.read_back(model, self.factors)
            self.digests |= {name: digests[name] for name in self.digests.keys() & digests.keys()}
            self.put = True


@dataclass
class InitInfo:
    """Arguments of `/init_weight_transfer_engine`: the rendezvous of a group in which the learner is rank 0."""

    group: str = ""
    """The learner's name for it."""
    host: str = ""
    port: int | None = None
    """A transfer by files has None."""
    world_size: int = 0
    timeout: float = 60.0


@dataclass
class UpdateInfo:
    """A chunk: tensors `names` of the file at `path`, or the `tensors` of a broadcast."""

    path: str | None = None
    names: Sequence[str] = ()
    tensors: Tensors | None = None


class Receiver:
    """Weight-transfer engine of vLLM that takes chunks from files."""

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
        # without the factors, which may be an earlier run's
        self.account.group, self.account.factors = init_info.group, {}

    def start_weight_update(self) -> None:
        if not self.account.finished:  # aborted half-way: layers that wait would count their tensors twice
            self._discard()
            self._finalize()
        self.account.begin()
        self._initialize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if (update_info.path is None) == (update_info.tensors is None):
            raise ValueError("an update has either a path or tensors")
        tensors = self._from_file(update_info) if update_info.path else self._from_group(update_info)
        self.model.load_weights(self._weights(tensors))

    def finish_weight_update(self) -> None:
        self._finalize()
        self.account.end(self.model)

    def shutdown(self) -> None: ...

    def _weights(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Note all tensors, and yield those that are no factors."""
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
        """Drop the tensors that layers hold back: another model's do not fit, and would fail at every start."""
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
    """Receiver of chunks that are broadcast over gloo, through the host's memory, and of files."""

    kind = "gloo"
    _group: BroadcastGroup | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if init_info.port is not None:
            self.shutdown()
            parallel = self.parallel_config
            worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
            address, size, timeout = (init_info.host, init_info.port), init_info.world_size, init_info.timeout
            self._group = BroadcastGroup(self.kind, *address, rank=1 + worker, size=size, timeout=timeout)
        super().init_transfer_engine(init_info)

    def shutdown(self) -> None:
        group, self._group = self._group, None
        self.account.group = ""
        if group is not None:
            group.abort()

    def _from_group(self, info: UpdateInfo) -> Iterator[tuple[str, Tensor]]:
        if self._group is None:
            raise ValueError("this worker is in no group; init_weight_transfer_engine comes first")
        try:
            for name, tensor in receive(info.tensors or [], self._group):
                yield name, tensor.to(self.device)
        except BaseException:  # the model refused a tensor: do not wait for the next ones
            self.shutdown()
            raise


class NcclReceiver(GlooReceiver):
    """Receiver of chunks that are broadcast over NCCL, from the learner's GPU to the worker's."""

    kind = "nccl"


RECEIVERS: dict[str, type[Receiver]] = {c.kind: c for c in (Receiver, GlooReceiver, NcclReceiver)}
BACKENDS = {kind: f"mm_grpo_{kind}" for kind in RECEIVERS}
"""vLLM's name of each kind of transfer, for `--weight-transfer-config`."""


class WorkerExtension:
    """Methods of vLLM's workers, called by name through /collective_rpc."""

    account = Account()  # of this process's worker

    # set by vLLM's worker
    vllm_config: Any
    get_model: Callable[[], torch.nn.Module]

    def mm_grpo_received(self) -> dict[str, Any]:
        """Return the account of this process's worker for JSON, once the run's adapter is in vLLM's layers."""
        WorkerExtension.account.put_factors(self.get_model())
        return WorkerExtension.account.model_dump()

    def mm_grpo_adapter_layers(self, query: str) -> list[str]:
        """Return the layers for which vLLM has LoRA layers of at least a rank. `query` is [layers, rank] in JSON."""
        layers, rank = json.loads(query)
        lora = self.vllm_config.lora_config
        if lora is None or rank > lora.max_lora_rank:
            return []
        return sorted(adapters.supported_layers(self.get_model(), layers))


def register() -> None:
    """Register the backends in this process's vLLM, once, and patch its experts before it loads any."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    patch_experts()
    for kind, receiver in RECEIVERS.items():
        if BACKENDS[kind] not in Factory._registry:
            engine = type(receiver.__name__, (_AccountInit, receiver, WeightTransferEngine), {})
            Factory.register_engine(BACKENDS[kind], engine)


class _AccountInit:
    """Constructor of receivers that makes this process's account."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)  # type: ignore[call-arg]
        hf_config = vllm_config.model_config.hf_config
        patch_model(hf_config)
        mode, parallel = str(vllm_config.model_config.logprobs_mode), vllm_config.parallel_config
        size = parallel.tensor_parallel_size
        back = ReadBack(parallel.rank % size, size)
        self.account = Account(model=model_sizes(hf_config), logprobs_mode=mode, read_back=back)
        self.account.sleep_mode = device.type == "cpu" or vllm_config.model_config.enable_sleep_mode
        WorkerExtension.account = self.account


if "vllm.v1.worker.worker_base" in sys.modules:  # a worker of vLLM imports its extension
    register()
