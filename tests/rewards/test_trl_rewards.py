"""Every function of `trl.rewards`, unchanged, scores through ours as TRL has it score; ms-swift's kind too."""

import asyncio
import inspect

import pytest

from mm_grpo.rewards import Scorer

theirs = pytest.importorskip("trl.rewards", reason="trl is not installed; it is among requirements/cpu.txt")

TEXTS = [
    r"<think>one half</think>The answer is \boxed{\frac{1}{2}}",
    r"<think>no</think>\boxed{0.25}",
    r"\boxed{0.5}",
    "<think>never closed, 0.5",
    "",
    "<think>x</think><think>y</think> so \\boxed{3} 猫",
    "a b c " * 40,
]
SOLUTIONS = [r"$\frac{1}{2}$", "0.5", "0.5", "0.5", "what is this", "3", r"\boxed{6}"]
FUNCTIONS = {
    "accuracy_reward": theirs.accuracy_reward,
    "reasoning_accuracy_reward": theirs.reasoning_accuracy_reward,
    "think_format_reward": theirs.think_format_reward,
    "get_cosine_scaled_reward": theirs.get_cosine_scaled_reward(max_len=100),
    "get_repetition_penalty_reward": theirs.get_repetition_penalty_reward(ngram_size=2),
    "get_soft_overlong_punishment": theirs.get_soft_overlong_punishment(60, 20),
}


@pytest.fixture
def batch(rows):
    """The rows, whose token ids repeat so that there is something to penalise."""
    prompts, completions = rows(TEXTS, solution=SOLUTIONS)
    for completion in completions:
        object.__setattr__(completion, "token_ids", tuple(i % 37 for i in completion.token_ids))
    return prompts, completions


def as_trl_scores(function, batch):
    """What the function answers to TRL's trainer, which hands everything over by keyword."""
    prompts, completions = batch
    logged = {}
    answer = function(
        prompts=[list(p.sample.messages) for p in prompts],
        completions=[[{"role": "assistant", "content": c.text}] for c in completions],
        completion_ids=[list(c.token_ids) for c in completions],
        solution=[p.sample.columns["solution"] for p in prompts],
        trainer_state=None,
        log_extra=lambda column, values: logged.__setitem__(column, values),
        log_metric=lambda name, value: None,
    )
    return answer, logged


def test_no_function_is_forgotten():
    public = {name for name in theirs.__all__ if not inspect.ismodule(getattr(theirs, name))}
    assert public == FUNCTIONS.keys()


@pytest.mark.parametrize("settings", [{}, {"timeout": 100}], ids=["plain", "in a thread"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_scores_are_trls(batch, name, settings):
    expected, logged = as_trl_scores(FUNCTIONS[name], batch)
    scorer = Scorer([{"name": FUNCTIONS[name], "as": "r", **settings}])
    scores = scorer.score(*batch, step=1)
    assert scores.parts["r"] == expected and scores.extra == logged
    assert len({score for score in expected}) > 1, "the rows tell nothing apart"


SWIFT = """
class ORM:
    def __init__(self, args=None, **kwargs):
        self.args = args

    def __call__(self, **kwargs):
        raise NotImplementedError

class MathAccuracy(ORM):
    def __call__(self, completions, solution, **kwargs):
        return [1.0 if text.strip() == gold else 0.0 for text, gold in zip(completions, solution)]

class Overlong(ORM):
    def __init__(self, soft_max_length, soft_cache_length=4):
        self.soft_max_length, self.soft_cache_length = soft_max_length, soft_cache_length

    def __call__(self, completions, **kwargs):
        ids = kwargs.get("completion_ids")
        expected = self.soft_max_length - self.soft_cache_length
        return [min(-(len(i) - expected) / self.soft_cache_length, 0) for i in ids]

def plain(completions, **kwargs):
    return [float(len(completion)) for completion in completions]
"""


@pytest.mark.parametrize("isolated", [False, True])
def test_classes_of_ms_swift(rows, tmp_path, isolated, scorer):
    own = tmp_path / "plugin.py"
    own.write_text(SWIFT)
    made = scorer(
        {"name": f"{own}:MathAccuracy", "isolated": isolated},
        {"name": f"{own}:Overlong", "soft_max_length": 8, "isolated": isolated},
        {"name": f"{own}:plain", "completions": "text", "isolated": isolated},
        workers=1,
    )
    scores = made.score(*rows([" 3 ", "12", "123456"], solution=["3", "3", "3"]), step=1)
    assert scores.parts == {
        "MathAccuracy": [1.0, 0.0, 0.0],
        "Overlong": [0.0, 0.0, -0.5],
        "plain": [3.0, 2.0, 6.0],
    }


def test_a_class_that_lacks_an_argument_says_where_it_goes(tmp_path):
    (tmp_path / "plugin.py").write_text(SWIFT)
    with pytest.raises(Exception, match=r"the class '.*:Overlong' .* TypeError: .*'soft_max_length'"):
        Scorer([f"{tmp_path}/plugin.py:Overlong"])


# functions written for TRL and open-r1, called as they are -------------------------------------


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

    def reward_len(prompts, completions, **kwargs):  # TRL's docs, string completions
        seen.update(prompts=prompts, completions=completions)
        return [float(len(completion)) for completion in completions]

    scores = Scorer([reward_len], conversational=False).score(*rows(["ab", "c"]), step=1)
    assert scores.totals == [2.0, 1.0]
    assert seen == {"prompts": ["question 0", "question 1"], "completions": ["ab", "c"]}
