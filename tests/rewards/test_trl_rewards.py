"""Every function of `trl.rewards`, unchanged, scores through ours as TRL has it score; ms-swift's kind too."""

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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scores_are_trls(batch, name):
    expected, logged = as_trl_scores(FUNCTIONS[name], batch)
    scorer = Scorer([{"name": FUNCTIONS[name], "as": "r"}])
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


def test_classes_of_ms_swift(rows, tmp_path, scorer):
    own = tmp_path / "plugin.py"
    own.write_text(SWIFT)
    made = scorer(
        f"{own}:MathAccuracy",
        {"name": f"{own}:Overlong", "soft_max_length": 8, "isolated": True},
        {"name": f"{own}:plain", "completions": "text"},
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


def test_plain_texts_when_prompts_are_texts(rows):
    seen = {}

    def reward_len(prompts, completions, **kwargs):  # TRL's docs, string completions
        seen.update(prompts=prompts, completions=completions)
        return [float(len(completion)) for completion in completions]

    scores = Scorer([reward_len], conversational=False).score(*rows(["ab", "c"]), step=1)
    assert scores.totals == [2.0, 1.0]
    assert seen == {"prompts": ["question 0", "question 1"], "completions": ["ab", "c"]}
