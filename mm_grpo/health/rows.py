"""The guards that watch metrics over several steps, a row each.

Steps alone are not enough: a step may be 8 completions or 8192, and a reward that one completion in a hundred earns is
no failure in a small run. So some rows count completions or prompts too. A task that is solved also has equal rewards
and a sure policy; it is known by rewards near the highest of the run, and passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from mm_grpo.config import GRPOConfig
from mm_grpo.health import Alarm
from mm_grpo.health.history import MetricsHistory

PHANTOM_SHARE = 0.5
"""Share of a step's advantages in groups without a success from which a step is bad: below half, answers outweigh other
rewards. A share of 0 is no aim: if one answer in ten is right, 43 % of groups of 8 have none."""
FORMAT_STEPS = 20
"""Steps at the start of a run that `phantom_advantage` leaves out: a base model that has yet to learn the form of an
answer has no success, and learns the form. Once it has, equal scores leave such groups no advantages, and the share
falls by itself. If it does not, there is something else to win."""

Condition = Callable[[float, MetricsHistory], bool | None]
"""Of a metric's value and the run: True for a bad step, None for a step that says nothing."""


@dataclass
class Guard:
    """Guard that watches one metric: warns after bad steps in a row, and stops the run after fatal ones in a row.

    A step without the metric, or for which `is_bad` is None, neither counts nor ends a count.
    """

    name: str
    metric: str
    is_bad: Condition
    message: Callable[[int, float, MetricsHistory], str | None]
    """Text from the number of bad steps, the metric's value and the run ({0}, {1}, {2} for `format`); None if nothing
    can be said."""
    warn_after: int
    is_fatal: Condition = lambda value, run: False
    stop_after: int = 1
    bad_steps: int = field(default=0, init=False)
    fatal_steps: int = field(default=0, init=False)

    def observe(self, run: MetricsHistory) -> Alarm | None:
        """Count the newest step of `run`, and return an alarm if it is time for one."""
        value = run.now.get(self.metric)
        if value is None or (bad := self.is_bad(value, run)) is None:
            return None
        self.bad_steps = self.bad_steps + 1 if bad else 0
        self.fatal_steps = self.fatal_steps + 1 if self.is_fatal(value, run) else 0
        stops = self.fatal_steps >= self.stop_after
        due = stops or self.bad_steps >= self.warn_after
        message = self.message(self.bad_steps, value, run) if due else None
        return None if message is None else Alarm(message, "stop" if stops else "warn")


def equals(number: float) -> Condition:
    return lambda value, run: value == number


def at_least(number: float) -> Condition:
    return lambda value, run: value >= number


def guard_rows(config: GRPOConfig) -> list[Guard]:
    """Return the rows of a run. If several have one name, the first that fires in a step is the guard's."""
    completions = config.rollout.prompts_per_step * config.rollout.num_generations
    few, many = math.ceil(500 / completions), math.ceil(1000 / completions)
    rows = [  # name, metric, bad step, message, warn after, fatal step, stop after
        Guard("no_reward", "frac_reward_none", equals(1), no_reward, 10, never_rewarded),
        # a reward for one row in a hundred has applied by then but for a chance of 0.7 %
        Guard("no_reward", "frac_reward_none", some_never_applied, NEVER_APPLIED.format, 1),
        # if 1 in 100 earns a reward, 500 show no difference with a chance of 0.7 %, and 1000 of 0.004 %
        Guard("zero_std", "advantages/frac_zero", no_difference, zero_std, max(10, few), never_differed, max(20, many)),
        Guard("clipped_lengths", "completions/clipped_ratio", at_least(0.95), clipped_lengths, 10, all_are_masked, 20),
        Guard("entropy_collapse", "completions/mean_logprob", entropy_has_collapsed, entropy_collapse, 10),
        # healthy runs drop a few in a hundred, in sequence modes at most some tens
        Guard("masked_share", "sampling/masked_ratio", at_least(0.9), MASKED_SHARE.format, 10, equals(1), 20),
        # a tool whose every call fails teaches the model only not to call it
        Guard("tools_failing", "tools/call_frequency", all_calls_fail, TOOLS_FAILING.format, 5),
        Guard("tools_unused", "tools/call_frequency", equals(0), TOOLS_UNUSED.format, 10),
        Guard("phantom_advantage", "advantages/phantom_share", learns_other_rewards, PHANTOM.format, max(10, few)),
    ]  # fmt: skip
    # with kl_in_reward the KL is between engine and learner, whose rounding alone is above 0
    if config.algorithm.beta > 0 and not config.algorithm.kl_in_reward:
        rows.append(Guard("zero_kl", "kl", never_leaves_reference, ZERO_KL.format, 10))
    return rows


def at_the_end(run: MetricsHistory) -> tuple[str, Alarm] | None:
    """Return the name and alarm of a run that ends without an update, without rewards or without different rewards.

    A few steps without a difference show nothing: those of a smoke run are noise.
    """
    if not run.steps:
        return None
    if not run.weights_moved:
        why = f"the run made no update in {run.steps} steps: {why_no_update(run)}"
        return "no_update", Alarm(f"{why}. The weights are those that it began with", "stop")
    if not run.rewarded_steps:
        return "no_reward", Alarm(no_reward(run.steps, 1, run), "stop" if run.steps >= 10 else "warn")
    if not run.has_difference and run.rewarded_steps >= 10:
        return "zero_std", Alarm(zero_std(run.rewarded_steps, 1, run), "stop")
    return None


# conditions ----------------------------------------------------------------------------------


def never_rewarded(none: float, run: MetricsHistory) -> bool:
    return not run.rewarded_steps and run.steps >= 10 and run.has_seen(100)


def some_never_applied(none: float, run: MetricsHistory) -> bool:
    return run.rewarded_steps > 0 and run.steps >= 20 and run.has_seen(500) and bool(run.unapplied)


def no_difference(zero: float, run: MetricsHistory) -> bool | None:
    return None if run.now["frac_reward_none"] == 1 else zero == 1 and not run.solved


def never_differed(zero: float, run: MetricsHistory) -> bool:
    return not run.has_difference


def all_are_masked(share: float, run: MetricsHistory) -> bool:
    return run.masks_truncated and share == 1


def entropy_has_collapsed(logprob: float, run: MetricsHistory) -> bool | None:
    """Return True if the policy is surer than a small part of its start, next to certain, and not because it is right.

    The level at the start depends on the task, 0.1 to 1 nats per token at most; 50 tokens of 0.02 nats hold 1 nat, so a
    second sample is the same as the first with a chance of about 1 in 3.
    """
    # of all sampled tokens, because the learner's own `entropy` covers only the groups that it ran
    if run.first_entropy is None:
        return None
    return -logprob < 0.05 * run.first_entropy and -logprob < 0.02 and not run.solved


def all_calls_fail(calls: float, run: MetricsHistory) -> bool | None:
    return run.now["tools/failure_frequency"] == 1 if calls else None


def learns_other_rewards(share: float, run: MetricsHistory) -> bool | None:
    return None if run.steps <= FORMAT_STEPS else share >= PHANTOM_SHARE


def never_leaves_reference(kl: float, run: MetricsHistory) -> bool:
    # measured before a step's first update; in bfloat16 a few after it may honestly be 0
    return run.weights_moved_before and kl == 0


# messages ------------------------------------------------------------------------------------


def no_reward(bad: int, none: float, run: MetricsHistory) -> str:
    masked = re.compile("rewards/.+/(errors|timeouts)")
    failed = sum(value for name, value in run.now.items() if masked.fullmatch(name))
    cause = (
        f"{failed:.0f} calls of the last step failed and were masked (on_error, on_timeout): see the warnings above"
        if failed
        else "Likely the columns that the rewards read are null or have another name (data.columns; see "
        "`mm-grpo check CONFIG`)"
    )
    return f"for {bad} steps no completion has had a reward, so nothing is learned. {cause}"


NEVER_APPLIED = (
    "in {2.steps} steps {2.unapplied} applied to no completion. Likely its column is null or has another name "
    "(data.columns; see `mm-grpo check CONFIG`); correct that, or take it out of rewards"
)


def zero_std(bad: int, zero: float, run: MetricsHistory) -> str:
    mean = "" if run.reward is None else f" (the mean reward is {run.reward:.4g})"
    if not run.has_difference:
        return (
            f"in none of {run.rewarded_steps} steps did the rewards of any group differ{mean}, so nothing is learned "
            "from them. Likely the reward is constant, never finds its answer in the completion (see rollouts/ and "
            "`mm-grpo check CONFIG`), or all prompts are too hard or too easy: mix in others, or raise "
            f"rollout.num_generations{warm_advice(run.high, f'{run.steps} steps')}"
        )
    return (
        f"for {bad} steps the rewards of no group have differed{mean}, though they did before. Likely all completions "
        "of a prompt have become the same, or the rows that are left are too hard. Raise algorithm.entropy_coef or "
        "rollout.temperature, lower optim.learning_rate, or replace such groups (rollout.max_attempts > 1)"
        f"{warm_advice(run.high, f'{run.steps} steps')}"
    )


def warm_advice(highest: float | None, completions: str) -> str:
    """Return the end of a message, if the highest total of some completions is not above 0; else ""."""
    advice = (
        f"; no completion of {completions} scored above 0: the base never says such answers; `mm-grpo warm CONFIG "
        "--answer COLUMN` teaches the form"
    )
    return "" if highest is None or highest > 0 else advice


def clipped_lengths(bad: int, share: float, run: MetricsHistory) -> str:
    effect = (
        "algorithm.mask_truncated_completions leaves them out of the loss, so next to nothing is learned"
        if run.masks_truncated
        else "they have no end, and often no answer, when they are rewarded"
    )
    return (
        f"for {bad} steps nearly all completions ({share:.0%} in the last) have been cut at "
        f"rollout.max_completion_length = {run.max_length} tokens: {effect}. Raise the limit, ask for a shorter "
        "answer, or reward brevity (length)"
    )


def entropy_collapse(bad: int, logprob: float, run: MetricsHistory) -> str | None:
    if (reward := run.now.get("reward")) is None:
        return None
    return (
        f"the entropy of the policy has collapsed: {-logprob:.2g} nats per token, where the run began at "
        f"{run.first_entropy:.2g}, for {bad} steps, at a mean reward of {reward:.4g}: it is sure of wrong answers too. "
        "Lower optim.learning_rate, raise algorithm.entropy_coef or rollout.temperature, or go back to the best "
        "checkpoint"
    )


MASKED_SHARE = (
    "for {0} steps algorithm.importance_sampling_mode has dropped nearly all tokens, {1:.0%} in the last. Likely the "
    "engine's log-probs are not those of the learner (see `mm-grpo doctor CONFIG`), completions are learned from too "
    "often (algorithm.num_iterations, optim.updates_per_step), or the bounds of that option are too narrow"
)
TOOLS_FAILING = (
    "for {0} steps every call of a tool has failed (see `turns` in rollouts/): fix the tool, or show a right call in "
    "the prompt"
)
TOOLS_UNUSED = (
    "for {0} steps no completion has called a tool, although the run has some. Tell the model in the prompt when to "
    "call one, reward a call, or leave rollout.tools and rollout.environment out"
)
PHANTOM = (
    "for {0} steps most of what was learned ({1:.0%} of the advantages in the last) came from groups without a "
    "success, whose other rewards alone differ: the run learns these. Set outcome: true on the reward that says what "
    "is right, or mix in rows that are answered right at times"
)
ZERO_KL = (
    "for {0} steps the KL to the reference policy has been exactly 0, though updates moved the weights: the reference "
    "is the policy itself, or the updates are too small for the weights' number format. Raise optim.learning_rate or "
    "train in float32 (model.dtype), or set algorithm.beta=0"
)


def why_no_update(run: MetricsHistory) -> str:
    if run.overflows and not run.updates:
        return "every gradient overflowed; lower optim.learning_rate or train in float32 (model.dtype)"
    if run.updates and run.learning_rate == 0:
        return f"the learning rate was 0 in all {run.updates} updates; raise optim.learning_rate"
    if not run.rewarded_steps:
        return "no completion had a reward; see `mm-grpo check CONFIG`, and data.columns for the names of columns"
    if not run.has_difference:
        return (
            "the rewards of no group differed, so there was nothing to learn from; see `mm-grpo check CONFIG` and "
            f"rollouts/{warm_advice(run.high, f'{run.steps} steps')}"
        )
    return (
        "no token that enters the loss had a gradient: see completions/clipped_ratio "
        "(algorithm.mask_truncated_completions), and clip_ratio/region_mean and sampling/masked_ratio (bounds)"
    )
