"""Plain functions, called in the trainer's process, one call after the other.

With a time-out they run in a thread, which can be waited for but not ended, so that a time-out stops the run; where the
thread lets nothing else run, a watchdog ends the process.
"""

from __future__ import annotations

import threading

from mm_grpo.errors import RewardError
from mm_grpo.rewards.call import Call, RewardCalls
from mm_grpo.watchdog import Watchdog

WITHOUT_LOCK = 5.0
"""Seconds after a time-out in which this process must have noticed it, or be ended."""
_ISOLATE = "With isolated: true it runs in a process that can be killed, and on_timeout: mask goes on"


def run_plain(results: RewardCalls) -> None:
    """Call a plain function for each call, in order; in a thread when there is a deadline."""
    deadline, calls = results.spec.options.deadline, results.calls
    if deadline is None:
        for call in calls:
            _call(call, results)
        return
    done = 0
    raised: list[BaseException] = []

    def run() -> None:
        nonlocal done
        try:
            for call in calls:
                _call(call, results)
                done += 1
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=f"reward {results.spec.name}", daemon=True)
    hangs = (
        f"error: reward {results.spec.name!r} had not answered after timeout = {deadline:g} s, and lets nothing else "
        "of this process run (a regular expression or C code that holds the interpreter's lock), so the process is "
        f"ended; where it stands follows. {_ISOLATE}"
    )
    with Watchdog(deadline + WITHOUT_LOCK, hangs):
        thread.start()
        thread.join(deadline)
    if raised:
        raise raised[0]
    if thread.is_alive():
        raise RewardError(
            f"{calls[min(done, len(calls) - 1)].blame()} had not answered after timeout = {deadline:g} s. A "
            f"plain function runs in the trainer's process, in a thread that cannot be killed, so the run "
            f"stops. {_ISOLATE}"
        )


def _call(call: Call, results: RewardCalls) -> None:
    """One call, made again where it raised and retries are left."""
    for tries_left in range(call.spec.options.retries, -1, -1):
        try:
            answer = call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit(0) too, which must not end the run as a success
            if not tries_left:
                results.failed(call, call.raised(error), error)
        else:
            results.answered(call, answer)
            return
