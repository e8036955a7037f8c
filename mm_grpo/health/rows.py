"""The guards that watch metrics over several steps, a row each.

Steps alone are not enough where a step may be 8 completions or 8192, and a reward that one completion in a hundred
earns is no failure in a small run: some rows count completions or prompts too. A task that is solved also has equal
rewards and a sure policy; it is known by rewards near the highest of the run, and passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mm_grpo.config import GRPOConfig
from mm_grpo.health import Alarm
from mm_grpo.health.history import History
from mm_grpo.rewards.spec import RewardSpec

PHANTOM = 0.5
"""Share of a step's advantages in groups without a success from which a step is bad: below half, answers outweigh other
rewards. A share of 0 is no aim: where one answer in ten is right, 43 % of groups of 8 have none."""
FORMAT_STEPS = 20
"""Steps at the start of a run that the guard leaves out: a base that has yet to learn the form of an answer has no
success, and learns the form. Once it has, equal scores leave such groups no advantages, and the share falls by itself;
where it does not in half as many steps again, there is something else to win."""


@dataclass
class Guard:
    """Warns after `steps` bad steps in a row, those for which `when` holds; stops the run after `stop_after` for which
    `stop_when` does. They are asked with the value of `metric` and the run.

    A step without that metric, or for which `when` is None, says nothing: it neither counts nor ends a count. `message`
    gets the number of bad steps too; None where nothing can be said.
    """

    name: str
    metric: str
    when: Callable[[float, History], bool | None]
    message: Callable[[int, float, History], str | None]
    steps: int
    stop_when: Callable[[float, History], bool] = lambda value, run: False
    stop_after: int = 1
    bad: int = field(default=0, init=False)
    worst: int = field(default=0, init=False)

    def observe(self, run: History) -> Alarm | None:
        """Take in the newest step of `run`."""
        value = run.now.get(self.metric)
        if value is None or (bad := self.when(value, run)) is None:
            return None
        self.bad = self.bad + 1 if bad else 0
        self.worst = self.worst + 1 if self.stop_when(value, run) else 0
        stops = self.worst >= self.stop_after
        message = self.message(self.bad, value, run) if stops or self.bad >= self.steps else None
        return None if message is None else Alarm(message, "stop" if stops else "warn")


def rows_of(config: GRPOConfig, rewards: Sequence[RewardSpec]) -> list[Guard]:
    """The rows of a run. Of those with one name, the first that fires in a step is the guard's.

    Rewards of weight 0, and those that wait for a gate (`only_if`), which may stay shut for long, may apply to nothing.
    """
    algorithm, limit = config.algorithm, config.rollout.max_completion_length
    prompts = config.rollout.prompts_per_step
    completions = prompts * config.rollout.num_generations
    cut_are_left_out = algorithm.mask_truncated_completions
    effect = (
        "algorithm.mask_truncated_completions leaves them out of the loss, so next to nothing is learned"
        if cut_are_left_out
        else "they have no end, and often no answer, when they are rewarded"
    )
    names = [spec.name for spec in rewards if spec.weight != 0 and not spec.options.only_if]

    def has_seen(run: History, enough: int) -> bool:
        return run.now.get("epoch", 0) >= 1 or run.steps * prompts >= enough

    def unapplied(run: History) -> list[str]:
        return [name for name in names if f"rewards/{name}/mean" not in run.measured]

    rows = [
        Guard(
            "no_reward",
            "frac_reward_none",
            when=lambda none, run: none == 1,
            steps=10,
            stop_when=lambda none, run: not run.rewarded and run.steps >= 10 and has_seen(run, 100),
            message=no_reward,
        ),
        Guard(  # a reward for one row in a hundred has applied by then but for a chance of 0.7 %
            "no_reward",
            "frac_reward_none",
            when=lambda none, run: (
                run.rewarded and run.steps >= 20 and has_seen(run, 500) and bool(unapplied(run))
            ),
            steps=1,
            message=lambda bad, none, run: (
                f"in {run.steps} steps {', '.join(unapplied(run))} applied to no completion. Likely its column is null "
                "or has another name (data.columns; see `mm-grpo check CONFIG`); mend that, or take it out of rewards"
            ),
        ),
        Guard(  # where 1 in 100 earns a reward, 500 show no difference with a chance of 0.7 %, and 1000 of 0.004 %
            "zero_std",
            "advantages/frac_zero",
            when=lambda zero, run: None if run.now["frac_reward_none"] == 1 else zero == 1 and not run.solved,
            steps=max(10, -(-500 // completions)),
            stop_when=lambda zero, run: not run.spread,
            stop_after=max(20, -(-1000 // completions)),
            message=zero_std,
        ),
        Guard(
            "clipped_lengths",
            "completions/clipped_ratio",
            when=lambda share, run: share >= 0.95,
            steps=10,
            stop_when=lambda share, run: cut_are_left_out and share == 1,
            stop_after=20,
            message=lambda bad, share, run: (
                f"for {bad} steps nearly all completions ({share:.0%} in the last) have been cut at "
                f"rollout.max_completion_length = {limit} tokens: {effect}. Raise the limit, ask for a shorter answer, "
                "or reward brevity (length)"
            ),
        ),
        Guard(
            "entropy_collapse",
            "completions/mean_logprob",
            when=entropy_has_collapsed,
            steps=10,
            message=entropy_collapse,
        ),
        Guard(  # healthy runs drop a few in a hundred, in sequence modes at most some tens
            "masked_share",
            "sampling/masked_ratio",
            when=lambda share, run: share >= 0.9,
            steps=10,
            stop_when=lambda share, run: share == 1,
            stop_after=20,
            message=lambda bad, share, run: (
                f"for {bad} steps algorithm.importance_sampling_mode has dropped nearly all tokens, {share:.0%} in the "
                "last. Likely the engine's log-probs are not those of the learner (see `mm-grpo doctor CONFIG`), "
                "completions are learned from too often (algorithm.num_iterations, optim.updates_per_step), or the "
                "bounds of that option are too narrow"
            ),
        ),
        Guard(  # a tool whose every call fails teaches the model only not to call it
            "tools_failing",
            "tools/call_frequency",
            when=lambda calls, run: run.now["tools/failure_frequency"] == 1 if calls else None,
            steps=5,
            message=lambda bad, calls, run: (
                f"for {bad} steps every call of a tool has failed (see `turns` in rollouts/): mend the tool, or show a "
                "right call in the prompt"
            ),
        ),
        Guard(
            "tools_unused",
            "tools/call_frequency",
            when=lambda calls, run: calls == 0,
            steps=10,
            message=lambda bad, calls, run: (
                f"for {bad} steps no completion has called a tool, although the run has some. Tell the model in the "
                "prompt when to call one, reward a call, or leave rollout.tools and rollout.environment out"
            ),
        ),
        Guard(
            "phantom_advantage",
            "advantages/phantom_share",
            when=lambda share, run: None if run.steps <= FORMAT_STEPS else share >= PHANTOM,
            steps=max(10, -(-500 // completions)),
            message=lambda bad, share, run: (
                f"for {bad} steps most of what was learned ({share:.0%} of the advantages in the last) came from "
                "groups without a success, whose other rewards alone differ: the run learns these. Set outcome: true "
                "on the reward that says what is right, or mix in rows that are answered right at times"
            ),
        ),
        Guard(  # measured before a step's first update; in bfloat16 a few after it may honestly be 0
            "zero_kl",
            "kl",
            when=lambda kl, run: run.moved_before and kl == 0,
            steps=10,
            message=lambda bad, kl, run: (
                f"for {bad} steps the KL to the reference policy has been exactly 0, though updates moved the weights: "
                "the reference is the policy itself, or the updates are too small for the weights' number format. "
                "Raise optim.learning_rate or train in float32 (model.dtype), or set algorithm.beta=0"
            ),
        ),
    ]
    # with kl_in_reward the KL is between engine and learner, whose rounding alone is above 0
    return rows if algorithm.beta > 0 and not algorithm.kl_in_reward else rows[:-1]


def at_the_end(run: History) -> tuple[str, Alarm] | None:
    """The guard that holds at the end of a run, after everything was saved: one without an update, without rewards or
    without spread is no success. A few steps without spread show nothing: those of a smoke run are noise.
    """
    if not run.steps:
        return None
    if not run.moved:
        why = f"the run made no update in {run.steps} steps: {why_no_update(run)}"
        return "no_update", Alarm(f"{why}. The weights are those that it began with", "stop")
    if not run.rewarded:
        return "no_reward", Alarm(no_reward(run.steps, 1, run), "stop" if run.steps >= 10 else "warn")
    if not run.spread and run.rated_steps >= 10:
        return "zero_std", Alarm(zero_std(run.rated_steps, 1, run), "stop")
    return None


# longer conditions and messages --------------------------------------------------------------


def no_reward(bad: int, none: float, run: History) -> str:
    masked = re.compile("rewards/.+/(errors|timeouts)")
    failed = sum(value for name, value in run.now.items() if masked.fullmatch(name))
    cause = (
        f"{failed:.0f} calls of the last step failed and were masked (on_error, on_timeout): see the warnings above"
        if failed
        else "Likely the columns that the rewards read are null or have another name (data.columns; see "
        "`mm-grpo check CONFIG`)"
    )
    return f"for {bad} steps no completion has had a reward, so nothing is learned. {cause}"


def zero_std(bad: int, zero: float, run: History) -> str:
    mean = "" if run.reward is None else f" (the mean reward is {run.reward:.4g})"
    if not run.spread:
        return (
            f"in none of {run.rated_steps} steps did the rewards of any group differ{mean}, so nothing is learned from "
            "them. Likely the reward is constant, never finds its answer in the completion (see rollouts/ and "
            "`mm-grpo check CONFIG`), or all prompts are too hard or too easy: mix in others, or raise "
            "rollout.num_generations"
        )
    return (
        f"for {bad} steps the rewards of no group have differed{mean}, though they did before. Likely all completions "
        "of a prompt have become the same, or the rows that are left are too hard. Raise algorithm.entropy_coef or "
        "rollout.temperature, lower optim.learning_rate, or replace such groups (rollout.max_attempts > 1)"
    )


def entropy_has_collapsed(logprob: float, run: History) -> bool | None:
    """Whether the policy is surer than a small part of its own beginning, next to certain, and not because it is right.

    The level at the start depends on the task, 0.1 to 1 nats per token at most; 50 tokens of 0.02 nats hold 1 nat, so a
    second sample is the same as the first with a chance of about 1 in 3. It is estimated from all sampled tokens, for
    the learner's own `entropy` covers only the groups that it ran.
    """
    if run.first_entropy is None:
        return None
    return -logprob < 0.05 * run.first_entropy and -logprob < 0.02 and not run.solved


def entropy_collapse(bad: int, logprob: float, run: History) -> str | None:
    if (reward := run.now.get("reward")) is None:
        return None
    return (
        f"the entropy of the policy has collapsed: {-logprob:.2g} nats per token, where the run began at "
        f"{run.first_entropy:.2g}, for {bad} steps, at a mean reward of {reward:.4g}: it is sure of wrong answers too. "
        "Lower optim.learning_rate, raise algorithm.entropy_coef or rollout.temperature, or go back to the best "
        "checkpoint"
    )


def why_no_update(run: History) -> str:
    if run.overflows and not run.updates:
        return "every gradient overflowed; lower optim.learning_rate or train in float32 (model.dtype)"
    if run.updates and run.learning_rate == 0:
        return f"the learning rate was 0 in all {run.updates} updates; raise optim.learning_rate"
    if not run.rewarded:
        return "no completion had a reward; see `mm-grpo check CONFIG`, and data.columns for the names of columns"
    if not run.spread:
        return (
            "the rewards of no group differed, so there was nothing to learn from; see `mm-grpo check CONFIG` and "
            "rollouts/"
        )
    return (
        "no token that enters the loss had a gradient: see completions/clipped_ratio "
        "(algorithm.mask_truncated_completions), and clip_ratio/region_mean and sampling/masked_ratio (bounds)"
    )
