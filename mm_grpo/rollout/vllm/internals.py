"""Everything that knows how a running vLLM is worked: requests, weight reload, caches, sleep.

The engine proper (`engine.py`) speaks of prompts, seeds and weights, and reaches vLLM through here
and `launch.py` only. Features are tried for, versions never compared; `tests/engines` is what a new
version must pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mm_grpo.errors import EngineError
from mm_grpo.rollout.vllm import adapters
from mm_grpo.rollout.vllm.launch import Handle, first_line
from mm_grpo.rollout.vllm.read_back import quiet_reload
from mm_grpo.rollout.vllm.requests import EngineAnswer, EngineRequest, Sampled

# running -------------------------------------------------------------------------------------


def run(handle: Handle, item: EngineRequest) -> EngineAnswer:
    """Run a request alone."""
    add(handle, item)
    while not (done := step(handle, [item.uid])):
        pass
    return done[0][1]


def add(handle: Handle, item: EngineRequest) -> str:
    """Add a request to those that run; returns its name, under which all its generations are answered together."""
    from vllm import SamplingParams

    with _given_up_on_failure(handle, [item.uid]), _eager():
        (name,) = handle.llm.enqueue(
            [_prompt(item)], [SamplingParams(**item.params)], lora_request=handle.adapter, use_tqdm=False
        )
        # newer versions run a request under names of their own, one for each of its generations, and answer under the
        # one that it was given; its states are the latest
        state = next(reversed(handle.llm.llm_engine.output_processor.request_states.values()))
        return str(getattr(state, "external_req_id", None) or name)


def step(handle: Handle, uids: Sequence[str]) -> list[tuple[str, EngineAnswer]]:
    """One step of the requests that were added, of the rows `uids`; the names and answers of those that are done."""
    with _given_up_on_failure(handle, uids), _eager():
        outputs = handle.llm.llm_engine.step()
    return [(str(output.request_id), _answer(output)) for output in outputs if output.finished]


@contextmanager
def _given_up_on_failure(handle: Handle, uids: Sequence[str]) -> Iterator[None]:
    """Give all requests up where something is raised, an interrupt too: the next call would answer them."""
    try:
        yield
    except BaseException as error:
        give_up(handle)
        if isinstance(error, EngineError) or not isinstance(error, Exception):
            raise
        known = list(dict.fromkeys(uids))
        rows = ", ".join(known[:3]) + (", ..." if known[3:] else "")
        raise EngineError(
            f"vLLM failed while it sampled {len(uids)} request(s) ({rows}): "
            f"{type(error).__name__}: {first_line(error)}. Its requests were given up and nothing of this step "
            "was kept"
        ) from error


def _prompt(item: EngineRequest) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": list(item.token_ids)}
    if item.images:
        prompt["multi_modal_data"] = {"image": list(item.images)}
    return prompt


def give_up(handle: Handle) -> None:
    """Give up whatever is queued or half done; an engine that cannot do so is not used again.

    A step that died may leave the scheduler believing in cache entries that were never written.
    """
    engine = handle.llm.llm_engine
    try:
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        left = engine.has_unfinished_requests()
        reset_prefix_cache(handle)
        reset_encoder_cache(handle)
    except Exception as error:
        handle.fault = f"after a failure it could not be brought back ({first_line(error)})"
        return
    if left:
        handle.fault = "its requests could not be given up after a failure"


def _answer(output: Any) -> EngineAnswer:
    """vLLM's answer, whose log-probs are flat records of the chosen tokens alone, and of a prompt's after its first."""
    sequences = sorted(output.outputs, key=lambda o: o.index)
    prompt = output.prompt_logprobs
    return EngineAnswer(
        tuple(output.prompt_token_ids),
        tuple(Sampled(tuple(s.token_ids), _flat(s.logprobs), s.finish_reason) for s in sequences),
        () if prompt is None else (None, *_flat(prompt)),
    )


def _flat(record: Any) -> tuple[float, ...]:
    return () if record is None else tuple(record.logprobs)


def _eager() -> Any:
    """On a CPU, small helpers of vLLM's sampler would each start a C++ compiler on first use."""
    return nullcontext() if torch.cuda.is_available() else torch.compiler.set_stance("force_eager")


# weights and memory --------------------------------------------------------------------------


def reload(handle: Handle, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load `tensors` into the worker as its weights.

    When `tensors` itself fails, the worker is let finish with what came, for it cannot be left half-way; the
    failure is raised after that, and the engine is whole again once every tensor has been sent. A failure
    of the worker, as by weights of another size, ends the engine.
    """
    failures: list[Exception] = []

    def until_failure() -> Iterator[tuple[str, Tensor]]:
        try:
            yield from tensors
        except Exception as error:
            failures.append(error)

    with _eager(), _lost_on_failure(handle, "took new weights"), quiet_reload():
        handle.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": until_failure()})
    if failures:
        raise failures[0]


def read_back(handle: Handle) -> dict[str, str]:
    """Digests of the tensors that the worker was given last, of its own layers where those can be read."""
    found: dict[str, str] = handle.llm.apply_model(handle.read_back.digests)[0]
    return found


def layers_taken(handle: Handle, layers: Sequence[str]) -> frozenset[str]:
    """Those of the learner's `layers` that the worker has LoRA layers for."""
    if not handle.adapters:
        return frozenset()
    found: frozenset[str] = handle.llm.apply_model(partial(adapters.layers_taken, layers=layers))[0]
    return found


def put_adapter(handle: Handle, factors: Mapping[str, Tensor]) -> dict[str, str]:
    """Make `factors` the adapter that requests are answered with; returns digests of what the worker's layers hold."""

    def put(model: Any) -> dict[str, str]:
        adapters.put(model, factors)
        return adapters.read_back(model, factors)

    with _lost_on_failure(handle, "took an adapter"):
        found: dict[str, str] = handle.llm.apply_model(put)[0]
    handle.adapter = handle.adapter or adapters.request()
    return found


def lend(handle: Handle, parameters: Mapping[str, Parameter]) -> int:
    """Make `parameters`, by the names in the last update, views of the worker's own tensors where those are the same to
    the bit; returns the bytes that became free."""
    own: dict[str, Tensor] = handle.llm.apply_model(handle.read_back.parts)[0]
    free = 0
    for name, parameter in parameters.items():
        part = own.get(name)
        if (
            part is not None
            and part.dtype == parameter.dtype
            and torch.equal(part.to(parameter.device), parameter)
        ):
            parameter.data = part
            handle.lent.append(parameter)
            free += part.nbytes
    return free


def give_back(handle: Handle) -> None:
    """Give the parameters of an earlier learner, which is about to lose the worker's tensors, tensors of their own."""
    while handle.lent:
        parameter = handle.lent.pop()
        parameter.data = parameter.data.clone()


def reset_prefix_cache(handle: Handle) -> None:
    if handle.llm.reset_prefix_cache() is False:
        raise EngineError("vLLM did not reset its prefix cache: requests are still running")


def reset_encoder_cache(handle: Handle) -> None:
    """Both halves: the worker's features and the scheduler's record of them."""
    handle.llm.llm_engine.reset_encoder_cache()


def sleep(handle: Handle, level: int) -> None:
    """Give memory back: at level 1 weights go to the host, at level 2 they are gone; lent ones stay at any level."""
    with _lost_on_failure(handle, "gave memory back"):
        handle.llm.sleep(level=0 if handle.lent else level)
        if handle.lent:
            handle.llm.llm_engine.release_kv_cache_memory()
    handle.asleep = {"kv_cache"} if handle.lent else {"weights", "kv_cache"}


def wake(handle: Handle, *parts: str) -> None:
    """Take the named parts back, or all that sleep."""
    due = sorted(handle.asleep & set(parts or handle.asleep), reverse=True)
    if due and torch.cuda.is_available():
        torch.cuda.empty_cache()  # vLLM takes memory from the device, not from torch's cache of freed blocks
    if due:
        with _lost_on_failure(handle, "took memory back"):
            handle.llm.wake_up(due)
        handle.asleep -= set(due)


@contextmanager
def _lost_on_failure(handle: Handle, what: str) -> Iterator[None]:
    """A call that may leave weights or allocations half-way: an engine that failed in it is not used again."""
    try:
        yield
    except BaseException as error:
        handle.fault = f"it failed while it {what} ({first_line(error)})"
        if not isinstance(error, Exception):
            raise
        raise EngineError(
            f"vLLM failed while it {what}: {type(error).__name__}: {first_line(error)}"
        ) from error
