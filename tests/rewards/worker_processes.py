"""The worker processes of a scorer, and whether processes have ended."""

from helpers.sessions import died, session, stat

from mm_grpo.rewards import Scorer

__all__ = ["died", "pids", "session", "stat"]


def pids(scorer: Scorer) -> list[int]:
    """The workers that a scorer holds and has not seen die."""
    groups = scorer._pool.workers.values()
    return [p.pid for group in groups for p in group.context.processes if p.exitcode is None]
