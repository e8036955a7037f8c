"""The user's functions and classes, called so that they can be ended and leave nothing behind.

- `worker.py`     what runs in a worker process: one function or object, and its calls one by one
- `workers.py`    `Worker` and `Workers`: processes that make one call at a time and are killed at its deadline
- `server.py`     the process that forks workers, and ends them with what they started when the trainer ends
- `thread.py`     `CallThread`: calls in the trainer's process that can be late, but not ended
- `loop.py`       `BackgroundLoop`: coroutines in the trainer's process
- `watchdog.py`   `Watchdog`: an end for this process where a call lets nothing else of it run
- `kept_state.py` copies of rows for user code, and the process's state put back after it
- `shared_image.py` images over the pixels of others, copied when they are first written to

Conversations with tools, each of which stays in one worker, are in `environments/workers.py`.
"""
