"""The interface of a rollout engine, and its requests.

Requests that share a prompt object stand side by side, so that an engine can run the prompt once for all of them. Each
request has its own seed however the engine batches.

An engine answers through a `RequestStream`: each request when it is done, with others added meanwhile. `generate` sends
one whole batch through a stream. An engine that can only answer whole batches returns a `BatchStream`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from mm_grpo.errors import EngineError, GuardStop

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from mm_grpo.types import Completion, Pictured, Prompt

Digest = Mapping[str, str]
"""`weights.digest` of every tensor as the engine received it, by name."""


class ReplicaLost(EngineError):
    """A check failed on one of several servers; the others still answer."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Truncation and penalties are for evaluation only."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or bool(self.min_p) or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class Request:
    """Request for one generation."""

    prompt: Prompt
    seed: int
    sampling: Sampling


@dataclass(frozen=True)
class Follows:
    """Origin of a request that continues an answered one of its stream: its prompt begins with that one's tokens."""

    number: int
    """Number of the answered request in the stream."""
    pictures: Sequence[Pictured] = ()
    """Images of what was appended since."""


class RequestStream(ABC):
    """Requests that an engine works on together, each answered when it is done. A context manager: its exit closes it.

    Until it is closed, call none of the engine's `generate`, `score` and `update_weights`.
    """

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Return the number of requests that have no answer yet."""

    @abstractmethod
    def add_request(self, request: Request, follows: Follows | None = None) -> int:
        """Add a request and return its number in the stream, counted from 0. Neighbours of one prompt share it.

        `follows` lets an engine run only what is new; it never changes the answer.
        """

    def add_group(self, requests: Sequence[Request]) -> list[int]:
        """Add requests that none will follow, and return their numbers."""
        return [self.add_request(request) for request in requests]

    @abstractmethod
    def step(self) -> list[tuple[int, Completion]]:
        """Work for a moment, such as a token of each request. Return the numbers and answers that are done."""

    # answered requests stay in memory without it, if the engine keeps rows to continue
    def release(self, number: int) -> None:  # noqa: B027
        """Forget an answered request, because none will follow it."""

    @abstractmethod
    def close(self) -> None:
        """Abort unfinished requests and free what the stream holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class RolloutEngine(ABC):
    """Base of engines that sample completions under the learner's weights.

    An engine is awake once it is made. While the learner works it sleeps, and frees device memory if it can. New
    weights come before `wake`: `update_weights` takes back the memory that it needs for them.
    """

    remote = False
    """True when the weights lie outside this process: several threads may then call the engine at once."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # runs with tools or early rewards call `stream`, and would silently bypass an overridden `generate`
        if "generate" in vars(cls) and "stream" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} defines `generate` without `stream`, which runs call; write `stream` in its place, or "
                "let `stream` return BatchStream(self.generate) if the engine can only answer whole batches"
            )

    @property
    def sentence(self) -> str:
        """Return a line of the log about the engine; "" for none."""
        return ""

    @property
    def sampler_version(self) -> str:
        """Return name and version of the random sampler; "" if a seed means the same in every version."""
        return ""

    @property
    def replicas(self) -> Sequence[Replica]:
        """Return the servers behind this engine, which all have to pass checks; empty for a single engine."""
        return ()

    @property
    def holds_weights(self) -> bool:
        """Return True when the tensors of earlier updates are still there; else the next update brings all."""
        return True

    def adapter_layers(self, layers: Iterable[str]) -> frozenset[str]:
        """Return the adapted `layers` for which the engine applies LoRA factors itself. Others come merged."""
        return frozenset()

    def use_adapters(self, layers: frozenset[str]) -> None:  # noqa: B027
        """Apply the factors of these `layers` from now on. `layers` are the result of `adapter_layers`."""
        # factors come with the other tensors, by the names of peft's files (learner/lora.py)

    @property
    def base_replaced(self) -> bool:
        """Return True if its weights may be others than those of `model.path`, which it read. Collective."""
        return False

    def share(self, parameters: Mapping[str, Parameter]) -> int:
        """Make frozen `parameters` views of the engine's own tensors if these are equal to the bit.

        `parameters` have the names under which they were sent. Return the bytes that became free.
        """
        return 0

    @abstractmethod
    def stream(self) -> RequestStream:
        """Open a stream of requests. Media tokens are never sampled."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return one completion per request, in order. Raises what the engine's stream raises."""
        if not requests:
            return []
        with self.stream() as stream:
            return answer_all(stream, requests)

    @abstractmethod
    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        """Take the learner's tensors as weights number `version`, and return the digests as received."""
        # whole layers come (`weights.unit_of`), because engines fuse neighbours such as q, k and v into one

    @abstractmethod
    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        """Return log-probabilities [T] of a given completion, without media mask, at temperature 1."""

    def metrics(self) -> dict[str, float]:
        """Return what the engine counted since the last call, by the metric's name."""
        return {}

    def sleep(self) -> None:  # noqa: B027
        """Free device memory for the learner."""

    def wake(self) -> None:  # noqa: B027
        """Take the device memory back."""

    def close(self) -> None:  # noqa: B027
        """Free what the engine holds."""


class Replica(Protocol):
    """Interface to check one of several servers. Both methods raise ReplicaLost if it fails."""

    @property
    def name(self) -> str: ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]: ...


class BatchStream(RequestStream):
    """Stream of an engine that can only answer whole batches: a step answers all requests that were added."""

    def __init__(self, generate: Callable[[Sequence[Request]], list[Completion]]) -> None:
        self.generate = generate
        self.waiting: list[tuple[int, Request]] = []
        self._count = 0

    @property
    def unfinished(self) -> int:
        return len(self.waiting)

    def add_request(self, request: Request, follows: Follows | None = None) -> int:
        number, self._count = self._count, self._count + 1
        self.waiting.append((number, request))
        return number

    def step(self) -> list[tuple[int, Completion]]:
        # emptied first: if `generate` raises, no later step must repeat the batch
        batch, self.waiting = self.waiting, []
        if not batch:
            return []
        completions = self.generate([request for _, request in batch])
        return [(number, completion) for (number, _), completion in zip(batch, completions, strict=True)]

    def close(self) -> None:
        self.waiting = []


def answer_all(
    stream: RequestStream,
    requests: Sequence[Request],
    on_completion: Callable[[int, Completion], None] | None = None,
) -> list[Completion]:
    """Send all requests through an idle stream, and return one completion per request, in order.

    `on_completion` is called with the index of a request and its completion as soon as that is there.
    """
    numbers = stream.add_group(requests)
    # numbers are no indices: a stream that answered other requests before counts on
    indices = {number: index for index, number in enumerate(numbers)}
    completions: dict[int, Completion] = {}
    while stream.unfinished:
        for number, completion in stream.step():
            completions[number] = completion
            if on_completion is not None:
                on_completion(indices[number], completion)
    return [completions[number] for number in numbers]


def requests_for(
    prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], sampling: Sampling
) -> list[Request]:
    """Make requests for P prompts with their seeds [P][G], prompt by prompt."""
    return [
        Request(prompt, seed, sampling)
        for prompt, group in zip(prompts, seeds, strict=True)
        for seed in group
    ]


def require_answers(requests: Sequence[Request], completions: Sequence[Completion], version: int) -> None:
    """Raise GuardStop unless each request was answered with its seed, and all of it under weights number `version`."""
    if len(completions) != len(requests):
        raise GuardStop(f"the engine answered {len(requests)} requests with {len(completions)} completions")
    for request, completion in zip(requests, completions, strict=True):
        label, tokens = f"{request.prompt.uid}: seed {request.seed}", len(completion.token_ids)
        if completion.seed != request.seed:
            raise GuardStop(
                f"{label} was asked for, and the engine says that it used {completion.seed}; completions of one seed "
                "repeat each other. Every request must be sampled with its own seed"
            )
        if not 0 < tokens <= request.sampling.max_tokens or len(completion.logprobs) != tokens:
            raise GuardStop(
                f"{label} came back with {tokens} tokens and {len(completion.logprobs)} log-probs; there must be 1 to "
                f"{request.sampling.max_tokens} tokens, and a log-prob for each"
            )
        # one span from token 0: an update during sampling adds another
        if completion.weight_versions != ((0, version),):
            listed = " and ".join(map(str, sorted({number for _, number in completion.weight_versions})))
            raise GuardStop(
                f"{label} was sampled under weight version {listed}, and the learner is at version {version}: the "
                "engine did not take a weight update"
            )
