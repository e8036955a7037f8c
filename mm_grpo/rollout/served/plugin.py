"""mm_grpo's plugin in vLLM's workers: backends of its weight-transfer API, and an account of what was received.

    vllm serve MODEL --weight-transfer-config '{"backend": "mm_grpo_file"}' \\
        --worker-extension-cls mm_grpo.rollout.served.plugin.WorkerExtension

Each worker imports the module of its extension before it makes its transfer engine, so that import is all that the
backends need to be known: no entry point, which would run in every vLLM of the machine. mm_grpo has to be importable
where the server runs. The backends themselves are in `plugin_engines.py`; `transfer.py` is their other end.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from mm_grpo.rollout.served.plugin_engines import RECEIVERS, Account
from mm_grpo.rollout.served.protocol import model_sizes

BACKENDS = {kind: f"mm_grpo_{kind}" for kind in RECEIVERS}
"""vLLM's name of each kind of transfer, for `--weight-transfer-config`."""
EXTENSION = "mm_grpo.rollout.served.plugin.WorkerExtension"
MODEL_VARIABLE = "MM_GRPO_SERVER_MODEL"


@dataclass
class _Worker:
    """The account of this process's worker."""

    account: Account = field(default_factory=Account)


_worker = _Worker()


class WorkerExtension:
    """Methods of vLLM's workers, called by name through /collective_rpc."""

    def mm_grpo_received(self) -> dict[str, Any]:
        """See `Account.as_json`."""
        return _worker.account.as_json()


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
        self.account = _worker.account = Account(model=model_sizes(hf_config))


if "vllm.v1.worker.worker_base" in sys.modules:  # a worker of vLLM's imports its extension
    register()
