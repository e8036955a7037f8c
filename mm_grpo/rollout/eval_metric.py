"""The number that evaluations are judged by (`run.headline`), with 95 % intervals; pass@k.

`run.headline` names one reward: the share of completions to which it gives at least a mark (accuracy), or its mean
score; without it the mean total reward counts.

A share has Wilson's score interval (Wilson 1927, doi:10.1080/01621459.1927.10502953), which stays in [0, 1] and has a
width at shares of 0 and 1 too. A mean has the normal interval, mean ± 1.96 standard errors, over the means of rows.
Both count rows, not completions: several completions of one row are not independent, and do not narrow an interval.
An interval covers another draw of rows, not other training seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING

from mm_grpo.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.types import Group

Z = NormalDist().inv_cdf(0.975)
Interval = tuple[float, float]


@dataclass(frozen=True)
class EvalMetric:
    """Metric of `run.headline`: a share, or a mean."""

    name: str | None = None
    """Reward whose scores count; None for the total."""
    mark: float | None = None
    """Least score that counts as right, for a share; None for a mean."""

    @classmethod
    def of(cls, config: GRPOConfig, rewards: Sequence[str]) -> EvalMetric:
        """Parse `run.headline`. ConfigError when it names none of the run's `rewards`."""
        text = config.run.headline
        if text is None:
            return cls()
        if ">=" in text:
            name, _, mark = (part.strip() for part in text.rpartition(">="))
            metric = cls(name, float(mark))
        else:
            name = text.removesuffix("mean").strip()
            metric = cls(name)
        if name not in rewards:
            raise ConfigError(
                f"run.headline = '{text}': no reward of the run is named '{name}'; they are named "
                f"{', '.join(rewards)}. {did_you_mean(name, rewards)}".rstrip()
            )
        return metric

    def __str__(self) -> str:
        if self.name is None:
            return "mean reward"
        return f"mean {self.name}" if self.mark is None else f"accuracy ({self.name} >= {self.mark:g})"

    @property
    def is_share(self) -> bool:
        return self.mark is not None

    def values(self, group: Group) -> list[float]:
        """Return a value for each completion of a scored group that has a score: 0 or 1, or the score."""
        all_scores = group.rewards if self.name is None else group.parts[self.name]
        scores = [score for score in all_scores if score is not None]
        return scores if self.mark is None else [float(score >= self.mark) for score in scores]

    def interval(self, rows: Sequence[Sequence[float]]) -> Interval | None:
        """Return the 95 % interval of the mean of all values; `rows` has the values row by row."""
        return wilson(rows) if self.is_share else normal(rows)


def mean(rows: Sequence[Sequence[float]]) -> float | None:
    """Return the mean over all values of all rows; None without values."""
    values = [value for row in rows for value in row]
    return fmean(values) if values else None


def wilson(rows: Sequence[Sequence[float]]) -> Interval | None:
    """Return Wilson's 95 % interval of the share of ones among the values of n rows.

    >>> "{:.4f} {:.4f}".format(*wilson([[1.0]] * 10))
    '0.7225 1.0000'
    """
    share, n = mean(rows), sum(bool(row) for row in rows)
    if share is None:
        return None
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def normal(rows: Sequence[Sequence[float]]) -> Interval | None:
    """Return the normal 95 % interval of the mean, by the means of rows; None for fewer than two rows."""
    means = [fmean(row) for row in rows if row]
    centre = mean(rows)
    if centre is None or len(means) < 2:
        return None
    half = Z * stdev(means) / sqrt(len(means))
    return centre - half, centre + half


def pass_at(rows: Sequence[Sequence[float]], k: int) -> float | None:
    """Return the chance that at least one of k completions is right, over the rows with at least k completions.

    The unbiased estimator of Chen et al. 2021, arXiv:2107.03374, section 2.1: with n completions, c of them right, the
    mean over rows of 1 - C(n - c, k) / C(n, k). `rows` hold 1.0 for right and 0.0 for wrong. None if no row has k.

    >>> pass_at([[1.0, 0.0, 0.0, 0.0]], 2)
    0.5
    """
    enough = [(len(row), round(sum(row))) for row in rows if len(row) >= k]
    return fmean(1 - comb(n - c, k) / comb(n, k) for n, c in enough) if enough else None


def score_text(score: float | None, interval: Interval | None = None, missing: str = "not measured") -> str:
    """Return a score with the ends of its interval, or `missing`."""
    ends = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
    return missing if score is None else f"{score:.3f}{ends}"
