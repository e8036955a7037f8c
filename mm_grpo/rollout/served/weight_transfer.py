"""The interface of a weight transfer to servers; `transfer.py` has the kinds that there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from mm_grpo.rollout.engine import Digest

if TYPE_CHECKING:
    from torch import Tensor

    from mm_grpo.rollout.served.client import ServerClient

Outcome = Mapping[str, "Digest | Exception"]
"""By a server's url: the digests of what it received, or why it was left out."""


class WeightTransfer(Protocol):
    """Carries weights to servers. Calls are not to overlap."""

    backend: str
    """Backend that servers are started with: `{"backend": ...}` of `--weight-transfer-config`."""
    keeps_weights: bool
    """True when `catch_up` can bring the weights sent last, once a `send` has gone through all tensors."""

    def weights_name(self, version: int) -> str:
        """Name the weights of this run and number: RUN:VERSION, RUN different for every transfer."""
        ...

    def connect(self, clients: Sequence[ServerClient]) -> None:
        """Join these servers, each for itself; one that is joined already is joined anew."""
        ...

    def send(
        self, clients: Sequence[ServerClient], tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> Outcome:
        """Bring `tensors`, whole layers, to the servers as weights number `version`."""
        ...

    def forget(self, client: ServerClient) -> None:
        """Forget what this server holds: all of the weights are sent next."""
        ...

    def catch_up(self, clients: Sequence[ServerClient]) -> Outcome | None:
        """Bring servers that joined late to the weights sent last, all of them; None where nothing is kept."""
        ...

    def close(self) -> None: ...
