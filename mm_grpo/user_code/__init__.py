"""Calls of the user's functions and classes that can be killed and leave nothing behind.

- `worker.py`     the code of a worker process: one function or object, and its calls one by one
- `workers.py`    `Worker` and `Workers`: processes that make one call at a time and are killed at its deadline
- `server.py`     the process that forks workers, and kills their sessions when the trainer ends
- `watchdog.py`   calls in the trainer's process with a deadline; ends the process when a call blocks the interpreter
- `kept_state.py` copies of rows for user code, and the process's state restored after it
- `shared_image.py` images that share pixels until they are first written to
- `lazy_image.py` images that are drawn or decoded when their pixels are first read

Not here: conversations with tools, each in one worker (`environments/workers.py`).
"""
