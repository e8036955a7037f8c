"""What a run leaves behind: its folder, and everything in it that can be read without the trainer.

    folder       RunFolder: a new run's folder, or one that is there already
    paths        RunPaths: where each file is
    environment  environment.json: the versions and the machine
    metrics      metrics.jsonl, one object a step
    summary      summary.json, the run in a few numbers
    rollout_log  rollouts/step-000001.jsonl and rollouts/images/
    checkpoint   checkpoints/step-000010: what a killed run needs to resume
    report       report.html, made from the folder alone; charts draws its curves
    progress     the bar on the terminal
    claim        the mark of a run folder, and the lock on it while a run writes there
    inputs       what a run reads, which may not lie in its folder
    same_run     what a resumed run must have in common with the checkpoint: rows, rewards, length
    stop_signals Ctrl-C, SIGTERM and SIGHUP: the end after a whole step
    trackers     tensorboard, wandb, trackio

To add a file that a run writes: its path in RunPaths, its name in `folder.FILES`, and its line in `folder.remove_run`.
"""
