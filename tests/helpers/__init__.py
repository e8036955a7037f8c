"""What several folders of tests share.

configs (the one builder of small configs), tiny (pictures, samples, tiny models), steps (the groups of one step and
their log-probs), small_runs and run_folders (runs in this process and in others, and what they leave behind),
processes (programs and ranks, as forks of the process in forkserver), patience (waits), workers (which tests stay
together where several processes run them).
"""
