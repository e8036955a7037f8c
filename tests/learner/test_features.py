"""Loss features of a user's own: the example of docs/algorithms.md, and addresses that are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.families import assert_same
from helpers.small_runs import ROWS, rows_of, vowels
from helpers.small_runs import config_for as run_config
from helpers.steps import config_for, gradients_of, learner_of, load, make_groups, plain_logp

from mm_grpo import GRPOTrainer
from mm_grpo.errors import ConfigError
from mm_grpo.processors.base import load_processor

DOCS = Path(__file__).parents[2] / "docs/algorithms.md"


def right(completion: str) -> float:
    return 1.0


@pytest.fixture
def imitate(tmp_path: Path) -> str:
    """The address of the class in the docs."""
    file = tmp_path / "imitate.py"
    file.write_text(DOCS.read_text().split("```python\n")[1].split("```")[0])
    return f"{file}:Imitate"


@pytest.mark.parametrize("packs", [4096, 70])
def test_the_example_adds_its_gradient_in_any_packs(packs: int, models: dict[str, Any], imitate: str) -> None:
    path = models["qwen2_5_vl"]
    groups = make_groups(load_processor(str(path)))
    groups = [replace(g, rewards=(1.0, 0.0, 0.5), advantages=(0.0,) * 3) for g in groups]
    changes: Any = {"algorithm": {"features": [imitate]}, "optim": {"max_tokens_per_pack": packs}}
    ours, report = gradients_of(learner_of(path, **changes), groups)
    model = load(path)
    logps = [plain_logp(model, config_for(path), g, g.completions[0])[0].sum() for g in groups]
    tokens = sum(len(c.token_ids) for g in groups for c in g.completions)
    (-0.1 / tokens * sum(logps)).backward()  # type: ignore[union-attr]
    assert_same(ours, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    imitated = sum(len(g.completions[0].token_ids) for g in groups)
    total = float(sum(logp.detach() for logp in logps))
    assert report.metrics["imitate/logp"] == pytest.approx(total / imitated, rel=1e-5)


def test_features_resume_with_the_same_code(models: dict[str, Path], tmp_path: Path, imitate: str) -> None:
    algorithm = {"features": [imitate], "perception_coef": 0.1, "top_entropy_quantile": 0.5}
    run = {"max_steps": 1, "save_every": 1}
    config = run_config(models["qwen2_vl"], tmp_path / "r", algorithm=algorithm, run=run)
    GRPOTrainer(config, train=ROWS, rewards=[right]).train()
    (row,) = rows_of(tmp_path / "r")
    assert row["imitate/logp"] < 0 < row["perception/kl"]
    file = Path(imitate.rpartition(":")[0])
    file.write_text(file.read_text().replace("-0.1 *", "-0.2 *"))
    again = config.with_values({"run.max_steps": 2})
    with pytest.raises(ConfigError, match=r"other ones \(.*Imitate"):
        GRPOTrainer(again, train=ROWS, rewards=[right], resume=True).train()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("absent.py:Imitate", "there is no file"),
        ("math:floor", "must be a subclass of"),
        ("x", "must be path/to"),
    ],
)
def test_a_wrong_address_is_refused_before_a_model_loads(
    address: str, why: str, tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(models["qwen2_vl"], tmp_path / "r", algorithm={"features": [address]})
    monkeypatch.setattr("mm_grpo.build._load_model", lambda *args, **options: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=rf"algorithm\.features = .*{why}"):
        GRPOTrainer(config, train=ROWS, rewards=[vowels])
