"""Calls into a running vLLM: requests, weight reload, caches, sleep.

`engine.py` knows prompts, seeds and weights, and reaches vLLM only through this file and `launch.py`. Features are
probed for, versions never compared; a new version must pass `tests/engines`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from mm_grpo.errors import EngineError
from mm_grpo.rollout.vllm import adapters
from mm_grpo.rollout.vllm.launch import Handle, first_line
from mm_grpo.rollout.vllm.read_back import quiet_reload
from mm_grpo.rollout.vllm.requests import EngineAnswer, EngineRequest, Sampled, multi_modal_data

# running -------------------------------------------------------------------------------------


def run(handle: Handle, item: EngineRequest) -> EngineAnswer:
    """Run a request alone."""
    add(handle, item)
    while not (answers := step(handle, [item.uid])):
        pass
    return answers[0][1]


def add(handle: Handle, item: EngineRequest) -> str:
    """Add a request. Return its name, under which all its generations are answered together."""
    from vllm import SamplingParams

    prompt: dict[str, Any] = {"prompt_token_ids": list(item.token_ids)}
    if item.media:
        prompt["multi_modal_data"] = multi_modal_data(item.media)
    with _abort_on_failure(handle, [item.uid]), _eager():
        (name,) = handle.llm.enqueue(
            [prompt], [SamplingParams(**item.params)], lora_request=handle.adapter, use_tqdm=False
        )
        # newer versions run a request under internal names, one for each generation, and answer under the name that
        # `enqueue` gave it; its states are the latest
        state = next(reversed(handle.llm.llm_engine.output_processor.request_states.values()))
        return str(getattr(state, "external_req_id", None) or name)


def step(handle: Handle, uids: Sequence[str]) -> list[tuple[str, EngineAnswer]]:
    """Run one step of all requests, of the rows `uids`. Return names and answers of finished requests."""
    with _abort_on_failure(handle, uids), _eager():
        outputs = handle.llm.llm_engine.step()
    return [(str(output.request_id), _answer(output)) for output in outputs if output.finished]


@contextmanager
def _abort_on_failure(handle: Handle, uids: Sequence[str]) -> Iterator[None]:
    """Abort all requests if the block raises, an interrupt too: else the next call would answer them."""
    try:
        yield
    except BaseException as error:
        abort_all(handle)
        if isinstance(error, EngineError) or not isinstance(error, Exception):
            raise
        unique = list(dict.fromkeys(uids))
        rows = ", ".join(unique[:3]) + (", ..." if unique[3:] else "")
        raise EngineError(
            f"vLLM failed while it sampled {len(uids)} request(s) ({rows}): "
            f"{type(error).__name__}: {first_line(error)}. Its requests were given up and nothing of this step "
            "was kept"
        ) from error


def abort_all(handle: Handle) -> None:
    """Abort all requests; an engine that cannot do so is not used again."""
    engine = handle.llm.llm_engine
    try:
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        unfinished = engine.has_unfinished_requests()
        # a step that failed may leave the scheduler believing in cache entries that were never written
        reset_prefix_cache(handle)
        reset_encoder_cache(handle)
    except Exception as error:
        handle.fault = f"after a failure it could not be brought back ({first_line(error)})"
        return
    if unfinished:
        handle.fault = "its requests could not be given up after a failure"


def _answer(output: Any) -> EngineAnswer:
    """Convert vLLM's answer: flat records of log-probs, of chosen tokens and of a prompt's tokens after its first."""
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
    # on a CPU, small helpers of vLLM's sampler would each start a C++ compiler on first use
    return nullcontext() if torch.cuda.is_available() else torch.compiler.set_stance("force_eager")


# weights and memory --------------------------------------------------------------------------


def reload(handle: Handle, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load `tensors` into the worker as its weights.

    If `tensors` itself fails, that is raised, and the engine is whole again once every tensor has been sent. A failure
    of the worker, as by weights of another size, ends the engine.
    """
    failures: list[Exception] = []  # raised after the worker is done, because it cannot stop half-way

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
    """Return digests of the last update's tensors, of the worker's own layers if they can be read."""
    return cast(dict[str, str], handle.llm.apply_model(handle.read_back.digests)[0])


def supported_layers(handle: Handle, layers: Sequence[str]) -> frozenset[str]:
    """Return the learner's `layers` for which the worker has LoRA layers."""
    if not handle.adapters:
        return frozenset()
    supported = handle.llm.apply_model(partial(adapters.supported_layers, layers=layers))[0]
    return cast(frozenset[str], supported)


def put_adapter(handle: Handle, factors: Mapping[str, Tensor]) -> dict[str, str]:
    """Make `factors` the adapter of all requests. Return digests of what the worker's layers hold."""

    def put(model: Any) -> dict[str, str]:
        adapters.put(model, factors)
        return adapters.read_back(model, factors)

    with _lost_on_failure(handle, "took an adapter"):
        digests: dict[str, str] = handle.llm.apply_model(put)[0]
    handle.adapter = handle.adapter or adapters.request()
    return digests


def lend(handle: Handle, parameters: Mapping[str, Parameter]) -> int:
    """Make `parameters`, by their names in the last update, views of the worker's own tensors if they are equal to the
    bit. Return the bytes that became free."""
    parts: dict[str, Tensor] = handle.llm.apply_model(handle.read_back.parts)[0]
    free = 0
    for name, parameter in parameters.items():
        part = parts.get(name)
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
    """Copy the lent tensors for the earlier learner that uses them, because the worker is about to change them."""
    while handle.lent:
        parameter = handle.lent.pop()
        parameter.data = parameter.data.clone()


def reset_prefix_cache(handle: Handle) -> None:
    if handle.llm.reset_prefix_cache() is False:
        raise EngineError("vLLM did not reset its prefix cache: requests are still running")


def reset_encoder_cache(handle: Handle) -> None:
    """Reset the worker's features and the scheduler's record of them."""
    handle.llm.llm_engine.reset_encoder_cache()


def sleep(handle: Handle, level: int) -> None:
    """Free memory. At level 1 weights move to the host, at level 2 they are gone; lent weights stay."""
    with _lost_on_failure(handle, "gave memory back"):
        handle.llm.sleep(level=0 if handle.lent else level)
        if handle.lent:
            handle.llm.llm_engine.release_kv_cache_memory()
    handle.asleep = {"kv_cache"} if handle.lent else {"weights", "kv_cache"}


def wake(handle: Handle, *parts: str) -> None:
    """Take back the memory of `parts`, or all that sleeps."""
    due = sorted(handle.asleep & set(parts or handle.asleep), reverse=True)
    if due and torch.cuda.is_available():
        torch.cuda.empty_cache()  # vLLM takes memory from the device, not from torch's cache of freed blocks
    if due:
        with _lost_on_failure(handle, "took memory back"):
            handle.llm.wake_up(due)
        handle.asleep -= set(due)


@contextmanager
def _lost_on_failure(handle: Handle, activity: str) -> Iterator[None]:
    """Mark the engine as lost if the block raises, because weights or allocations may be half-way."""
    try:
        yield
    except BaseException as error:
        handle.fault = f"it failed while it {activity} ({first_line(error)})"
        if not isinstance(error, Exception):
            raise
        raise EngineError(
            f"vLLM failed while it {activity}: {type(error).__name__}: {first_line(error)}"
        ) from error
