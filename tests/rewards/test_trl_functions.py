"""Functions written for TRL and open-r1, called as they are."""

import asyncio

from mm_grpo.rewards import Scorer


def reward_len(completions, **kwargs):  # TRL's docs, string completions
    return [float(len(completion)) for completion in completions]


def accuracy_reward(completions, solution, **kwargs):  # open-r1
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if c == s else 0.0 for c, s in zip(contents, solution, strict=True)]


def whole_signature(
    prompts, completions, completion_ids, trainer_state, log_extra, log_metric, solution, **kwargs
):
    assert [p[-1]["role"] for p in prompts] == ["user", "user"]
    assert completion_ids == [[0], [0, 1]]
    assert [len(images) for images in kwargs["images"]] == [1, 1]
    assert kwargs["difficulty"] == [1, 2]
    log_extra("solution", solution)
    log_metric("accuracy", 0.5)
    return [float(trainer_state.global_step), None]


async def async_reward(prompts, completions, solution, **kwargs):
    await asyncio.sleep(0)
    return [1.0 if c[0]["content"] == s else None for c, s in zip(completions, solution, strict=True)]


class LoadedJudge:
    __name__ = "judge"

    def __call__(self, prompts, completions, completion_ids=None, **kwargs):
        assert kwargs["trainer_state"].max_steps == 5 and "solution" in kwargs
        return [0.25] * len(completions)


def test_trl_functions_work_unchanged(rows):
    functions = [accuracy_reward, whole_signature, async_reward, LoadedJudge()]
    scorer = Scorer(functions, max_steps=5)
    scorer.check(["solution", "difficulty"])
    batch = rows(["3", "12"], solution=["3", "4"], difficulty=[1, 2])
    scores = scorer.score(*batch, step=2)
    assert scores.parts == {
        "accuracy_reward": [1.0, 0.0],
        "whole_signature": [2.0, None],
        "async_reward": [1.0, None],
        "judge": [0.25, 0.25],
    }
    assert scores.totals == [4.25, 0.25]
    assert scores.metrics["accuracy"] == 0.5
    assert scores.extra == {"solution": ["3", "4"]}
    scorer.close()


def test_plain_texts_when_prompts_are_texts(rows):
    seen = {}

    def f(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return reward_len(completions)

    scores = Scorer([f], conversational=False).score(*rows(["ab", "c"]), step=1)
    assert scores.totals == [2.0, 1.0]
    assert seen == {"prompts": ["question 0", "question 1"], "completions": ["ab", "c"]}
