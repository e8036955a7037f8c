"""Plain functions, called in the trainer's process, one call after the other.

With a time-out they run in a thread, which can be waited for but not ended, so that a time-out stops the run.
"""

from __future__ import annotations

from mm_grpo.errors import RewardError
from mm_grpo.rewards.call import Call, RewardCalls
from mm_grpo.user_code.watchdog import call_within


def run_plain(results: RewardCalls) -> None:
    """Call a plain function for each call, in order; in a thread when there is a deadline."""
    deadline, calls = results.spec.options.deadline, results.calls
    done = 0

    def run() -> None:
        nonlocal done
        for call in calls:
            _call(call, results)
            done += 1

    if deadline is None:
        run()
        return
    from mm_grpo.background import BackgroundThreads

    thread = BackgroundThreads(1, f"reward {results.spec.name}")
    try:
        call_within(deadline, thread, run)
    except TimeoutError:
        blame = calls[min(done, len(calls) - 1)].blame()
        raise RewardError(
            f"{blame} had not answered after timeout = {deadline:g} s, and a thread of the trainer cannot be killed. "
            f"With isolated: true it runs in a process that can be killed, and on_timeout: mask goes on"
        ) from None
    finally:
        thread.close()


def _call(call: Call, results: RewardCalls) -> None:
    try:
        answer = call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit(0) too, which must not end the run as a success
        results.failed(call, call.raised(error), error)
    else:
        results.answered(call, answer)
