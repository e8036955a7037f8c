"""Options that contradict or ignore one another: a line that names the field and the other one."""

from __future__ import annotations

from typing import Any

import pytest

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError

FOUR_BITS = {"engine_kwargs": {"quantization": "nf4"}}
GDPO = {"multi_objective_aggregation": "normalize_then_sum"}
MASKED = {"importance_sampling_mode": "token_mask", "importance_sampling_clip_min": 2.0}


def line_of(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.from_dict({**sections, "model": {"path": "m", **sections.get("model", {})}})
    (line,) = str(caught.value).splitlines()
    return line


def algorithm(**values: Any) -> dict[str, Any]:
    return {"algorithm": values}


def shared(transfer: str = "auto", **rollout: Any) -> dict[str, Any]:
    server = {"share_gpus": True, "transfer": transfer}
    return {"rollout": {"engine": "vllm_server", "server": server, **rollout}}


@pytest.mark.parametrize(
    ("field", "sections", "other"),
    [
        ("algorithm.epsilon_high", algorithm(loss_type="cispo", epsilon_high=0.2), "loss_type"),
        ("algorithm.scale_rewards", algorithm(advantage_estimator="rloo", scale_rewards="batch"),
         "advantage_estimator"),
        ("algorithm.advantage_estimator", algorithm(**GDPO, advantage_estimator="rloo"), "multi_objective_aggregation"),
        ("algorithm.kl_in_reward", algorithm(**GDPO, kl_in_reward=True, beta=0.1), "multi_objective_aggregation"),
        ("algorithm.kl_estimator", algorithm(kl_estimator="k1", beta=0.04), "kl_in_reward"),
        ("algorithm.delta", algorithm(delta=1.25, epsilon_high=0.28), "epsilon_high, which is 1.28"),
        ("algorithm.delta", algorithm(delta=4.0, loss_type="sapo"), "loss_type"),
        ("algorithm.importance_sampling_level", algorithm(importance_sampling_level="sequence", loss_type="vespo"),
         "loss_type"),
        ("algorithm.top_entropy_quantile", algorithm(top_entropy_quantile=0.5, loss_type="gmpo"), "loss_type"),
        ("algorithm.importance_sampling_clip_min", algorithm(**MASKED, importance_sampling_clip_max=0.5),
         "importance_sampling_clip_max"),
        ("optim.offload_optimizer", {"optim": {"zero_stage": 0, "offload_optimizer": True}}, "optim.zero_stage"),
        ("model.lora.vision", {"model": {"lora": {"vision": True}, "freeze_vision": True}}, "model.freeze_vision"),
        ("rollout.vllm.engine_kwargs", {"rollout": {"engine": "vllm", "vllm": FOUR_BITS}, "model": {"lora": {}}},
         "model.quantization"),
        ("rollout.vllm.engine_kwargs", {"rollout": {"engine": "vllm_server", "vllm": FOUR_BITS},
         "model": {"lora": {}, "quantization": "nf4"}}, "learner's process"),
        ("algorithm.perception_coef", {"algorithm": {"perception_coef": 0.1}, "rollout": {"environment": "zoom"}},
         "rollout.environment"),
        ("rollout.max_staleness", shared(max_staleness=1), "rollout.server.share_gpus"),
        ("rollout.server.transfer", shared(transfer="nccl"), "rollout.server.share_gpus"),
        ("rollout.vllm.sleep_level", shared(vllm={"sleep_level": 0}), "rollout.server.share_gpus"),
        ("data.min_pixels", {"data": {"min_pixels": 4, "max_pixels": 3}}, "data.max_pixels"),
        ("optim.updates_per_step", {"rollout": {"prompts_per_step": 4}, "optim": {"updates_per_step": 5}},
         "rollout.prompts_per_step"),
    ],
)  # fmt: skip
def test_a_contradiction_gets_one_line(field: str, sections: dict[str, Any], other: str) -> None:
    line = line_of(**sections)
    assert line.startswith(f"{field} = ") and other in line
