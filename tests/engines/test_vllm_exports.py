"""Exports under vLLM: the merged model from its folder, and the adapter over the base model, as the trainer scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.finished_runs import finished

from mm_grpo.processors.base import mm_processor_kwargs
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.vllm.launch import EngineSettings
from mm_grpo.trained.export import export_run


@pytest.mark.long
@pytest.mark.field_bug("lora-keys")
def test_vllm_reads_what_was_exported(models: dict[str, Path], tmp_path: Path) -> None:
    base = models["qwen2_5_vl"]
    run = finished(base, tmp_path / "run", model={"lora": {"rank": 4, "alpha": 8.0}})
    processor = run.trainer.processor

    def engine(path: Path, **kwargs: Any) -> VLLMEngine:
        settings = EngineSettings(
            model=str(path),
            dtype="float32",
            max_model_len=1024,
            mm_processor_kwargs=tuple(mm_processor_kwargs(processor).items()),
            engine_kwargs=tuple(kwargs.items()),
        )
        return VLLMEngine(settings, processor)

    export_run(run.root, tmp_path / "last", checkpoint="last")
    export_run(run.root, tmp_path / "adapter", checkpoint="last", adapter=True)
    merged = engine(tmp_path / "last")
    assert merged.score(run.prompt, run.answer) == pytest.approx(run.scores[3], abs=1e-4)
    adapted = engine(base, enable_lora=True, max_lora_rank=8)
    llm: Any = adapted._handle.llm
    found = scored(llm, run.prompt, run.answer, tmp_path / "adapter")
    assert found == pytest.approx(run.scores[3], abs=1e-4)
    assert max(abs(a - b) for a, b in zip(found, run.scores[2], strict=True)) > 1e-3


def scored(llm: Any, prompt: Any, answer: tuple[int, ...], adapter: Path) -> list[float]:
    """Log-probs of a completion by vLLM's own reading of an adapter."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    asked = {
        "prompt_token_ids": [*prompt.engine_prompt.token_ids, *answer],
        "multi_modal_data": {"image": list(prompt.engine_prompt.images)},
    }
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    request = LoRARequest(adapter.name, 1, str(adapter))
    (out,) = llm.generate([asked], params, lora_request=request, use_tqdm=False)
    assert len(out.prompt_token_ids) == len(prompt.token_ids) + len(answer)
    places = out.prompt_logprobs[-len(answer) :]
    return [place[token].logprob for place, token in zip(places, answer, strict=True)]
