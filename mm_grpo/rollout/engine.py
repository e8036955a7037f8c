"""The interface of a rollout engine, and its requests.

A `Request` is one generation: a prompt, a seed and a sampling setting. Requests that share a prompt
object stand side by side, so that an engine can run the prompt once for all of them; the seeds stay
one per generation however the engine batches.

An engine answers a whole batch (`generate`), or as a `RequestStream` each request when it is done, with others added
meanwhile. `stream_of` gives the stream of any engine: of one that has only `generate`, batch after batch.
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
    """One of several servers failed while it was checked; the others are there."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy; truncation and penalties are for evaluation only."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or bool(self.min_p) or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class Request:
    """One generation: its prompt, its own seed and how to sample."""

    prompt: Prompt
    seed: int
    sampling: Sampling


@dataclass(frozen=True)
class Follows:
    """Origin of a request that goes on: the `number` of one that was answered in the same stream, with which its prompt
    begins, and the `pictures` of what was appended to it since."""

    number: int
    pictures: Sequence[Pictured] = ()


class RequestStream(ABC):
    """Requests that an engine works on together, each answered when it is done. A context manager that ends in `close`.

    The engine's `generate`, `score` and `update_weights` are not to be called before.
    """

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Number of requests that have no answer yet."""

    @abstractmethod
    def add_request(self, request: Request, follows: Follows | None = None) -> int:
        """Add a request; returns its number in the stream, counted from 0. The neighbours of one prompt share it.

        `follows` lets an engine run what is new alone; it never changes the answer.
        """

    def add_group(self, requests: Sequence[Request]) -> list[int]:
        """Add requests that nothing will follow; returns their numbers."""
        return [self.add_request(request) for request in requests]

    @abstractmethod
    def step(self) -> list[tuple[int, Completion]]:
        """Work for a moment, a token of each request, say; returns the answers that are done, with their numbers."""

    def release(self, number: int) -> None:  # noqa: B027
        """Forget a request that was answered: none will follow it. Does nothing where nothing is kept."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is unfinished, and free what the stream holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class RolloutEngine(ABC):
    """An engine that samples completions under the learner's weights.

    It is awake once it is made. While the learner works it sleeps, and gives the device's memory back where it can. New
    weights come before it is woken: `update_weights` takes back what it needs for them.
    """

    remote = False
    """True where it holds its weights outside this process: several threads may call it at once."""

    @property
    def sentence(self) -> str:
        """What it runs on, for the log; "" where there is nothing to say."""
        return ""

    @property
    def sampler(self) -> str:
        """What draws its samples, where a seed's samples are those of one version of it alone."""
        return ""

    @property
    def replicas(self) -> Sequence[Replica]:
        """Its copies, for checks that every one of them has to pass; none where it is one."""
        return ()

    @property
    def holds_weights(self) -> bool:
        """True when the tensors of earlier updates are still there; if not, the next update brings every one."""
        return True

    def adapter_layers(self, layers: Iterable[str]) -> frozenset[str]:
        """Those of the learner's adapted `layers` whose adapters it runs as factors; it is sent a merge of the others.

        Factors come with the other tensors, by the names of peft's files (`learner/lora.py`).
        """
        return frozenset()

    def share(self, parameters: Mapping[str, Parameter]) -> int:
        """Lend frozen `parameters`, by the names under which they were sent, its own tensors in place of theirs.

        Only those that are the same to the bit; returns how many bytes became free.
        """
        return 0

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order. Media tokens are never sampled."""

    def stream(self) -> RequestStream:
        """Requests that are answered one by one, as they end; batch after batch where an engine has no stream."""
        return BatchStream(self.generate)

    @abstractmethod
    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        """Take the learner's tensors as weights number `version`; returns the digests as received.

        `tensors` are whole layers (see `weights.unit_of`), those that changed since the last update.
        """

    @abstractmethod
    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities [T] of a given completion, without media mask, at temperature 1."""

    def metrics(self) -> dict[str, float]:
        """What it counted since the last call, by the metric's name."""
        return {}

    def sleep(self) -> None:  # noqa: B027
        """Free the device for the learner. Does nothing where it holds no memory of its own."""

    def wake(self) -> None:  # noqa: B027
        """Take the device's memory back."""

    def close(self) -> None:  # noqa: B027
        """Free what the engine holds."""


class Replica(Protocol):
    """One of several servers, as an engine for checks: both methods raise ReplicaLost where it fails."""

    @property
    def name(self) -> str: ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]: ...


class BatchStream(RequestStream):
    """The stream of an engine that answers whole batches alone: a step answers all requests that were added."""

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
        asked, self.waiting = self.waiting, []
        if not asked:
            return []
        completions = self.generate([request for _, request in asked])
        return [(number, completion) for (number, _), completion in zip(asked, completions, strict=True)]

    def close(self) -> None:
        self.waiting = []


def stream_of(engine: RolloutEngine) -> RequestStream:
    """The stream of an engine: its own `stream()`, or one of batches where it has none, or where a subclass or the
    object itself has another `generate` than the one that belongs to it."""
    owner = next((c for c in type(engine).__mro__ if "generate" in vars(c) or "stream" in vars(c)), None)
    if owner is None or "stream" not in vars(owner) or "generate" in vars(engine):
        return BatchStream(engine.generate)
    own: RequestStream = vars(owner)["stream"](engine)
    return own


def answered(
    stream: RequestStream,
    requests: Sequence[Request],
    done: Callable[[int, Completion], None] | None = None,
) -> list[Completion]:
    """One completion per request, in order, by a stream that has no others.

    `done` gets each answer when it is there, with the place of its request; nothing may follow them then.
    """
    numbers = stream.add_group(requests)
    places = {number: place for place, number in enumerate(numbers)}
    found: dict[int, Completion] = {}
    while stream.unfinished:
        for number, completion in stream.step():
            found[number] = completion
            if done is not None:
                stream.release(number)
                done(places[number], completion)
    return [found[number] for number in numbers]


def requests_for(
    prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], sampling: Sampling
) -> list[Request]:
    """Requests for P prompts with their seeds [P][G], prompt by prompt."""
    return [
        Request(prompt, seed, sampling)
        for prompt, group in zip(prompts, seeds, strict=True)
        for seed in group
    ]


def require_answers(requests: Sequence[Request], completions: Sequence[Completion], version: int) -> None:
    """GuardStop unless each request was answered with its seed, and all of it under weights number `version`."""
    if len(completions) != len(requests):
        raise GuardStop(f"the engine answered {len(requests)} requests with {len(completions)} completions")
    for request, completion in zip(requests, completions, strict=True):
        what, tokens = f"{request.prompt.uid}: seed {request.seed}", len(completion.token_ids)
        if completion.seed != request.seed:
            raise GuardStop(
                f"{what} was asked for, and the engine says that it used {completion.seed}; completions of one seed "
                "repeat each other. Every request must be sampled with its own seed"
            )
        if not 0 < tokens <= request.sampling.max_tokens or len(completion.logprobs) != tokens:
            raise GuardStop(
                f"{what} came back with {tokens} tokens and {len(completion.logprobs)} log-probs; there must be 1 to "
                f"{request.sampling.max_tokens} tokens, and a log-prob for each"
            )
        if completion.weight_versions != ((0, version),):
            listed = " and ".join(map(str, versions_of(completion)))
            raise GuardStop(
                f"{what} was sampled under weight version {listed}, and the learner is at version {version}: the "
                "engine did not take a weight update"
            )


def versions_of(*completions: Completion) -> tuple[int, ...]:
    """The weight versions that completions were sampled under, each once, in order."""
    return tuple(sorted({version for c in completions for _, version in c.weight_versions}))
