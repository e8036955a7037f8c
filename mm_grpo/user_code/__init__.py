"""The user's functions and classes, called so that they can be ended and leave nothing behind.

- `worker.py`     what runs in a worker process: one function or object, and its calls one by one
- `workers.py`    `Worker` and `Workers`: processes that make one call at a time and are killed at its deadline
- `server.py`     the process that forks workers, and ends them with what they started when the trainer ends
- `watchdog.py`   calls in the trainer's process with a deadline; ends the process when a call blocks the interpreter
- `kept_state.py` copies of rows for user code, and the process's state put back after it
- `shared_image.py` images over the pixels of others, copied when they are first written to

Conversations with tools, each of which stays in one worker, are in `environments/workers.py`.
"""
