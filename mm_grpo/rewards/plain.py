"""Plain functions, called in the trainer's process, one call after the other.

With a time-out they run in a thread, which can be waited for but not ended, so that a time-out stops the run.
"""

from __future__ import annotations

from mm_grpo.errors import RewardError
from mm_grpo.rewards.call import RewardCalls
from mm_grpo.user_code.kept_state import kept_state
from mm_grpo.user_code.watchdog import call_within


def run_plain(reward: RewardCalls) -> None:
    """Make a reward's calls in order, and store the scores. Raise RewardError after its time-out."""
    deadline, current = reward.spec.options.deadline, reward.calls[0]

    def run() -> None:
        nonlocal current
        for current in reward.calls:
            try:
                answer = current()
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # sys.exit(0) too, which must not end the run as a success
                reward.fail(current.rows, current.raised(error), error)
            else:
                reward.set_answer(current, answer)

    with reward.clock(), kept_state(f"reward {reward.spec.name!r}"):
        if deadline is None:
            run()
            return
        from mm_grpo.background import BackgroundThreads  # its event loop's asyncio is slow to import

        thread = BackgroundThreads(1, f"reward {reward.spec.name}")
        try:
            call_within(deadline, thread, run)
        except TimeoutError:
            raise RewardError(
                f"{current.blame()} had not answered after timeout = {deadline:g} s, and a thread of the trainer "
                "cannot be killed. With isolated: true it runs in a process that can be killed, and on_timeout: mask "
                "goes on"
            ) from None
        finally:
            thread.close()
