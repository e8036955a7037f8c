"""Output of a run: its folder, and everything in it that can be read without the trainer.

    folder       RunFolder: a new run's folder, or one that is there already
    paths        RunPaths: where each file is
    environment  environment.json: the versions and the machine
    metrics      metrics.jsonl, one object a step, and events.jsonl, the guards that fired
    summary      summary.json, the run in a few numbers
    certificate  what the files of a run prove, counted from them and put into words
    evaluations  what the evaluations of a run found, before, best and last
    rollout_log  rollouts/step-000001.jsonl, rollouts/images/
    overlays     gold and predicted boxes and points, in pixels of a row's images
    json_records records as JSON values, and back by their type hints
    inflight_state  what a checkpoint keeps of the steps that were sampled ahead
    checkpoint   checkpoints/step-000010: what a killed run needs to resume; manifest, same_run say what it is of
    resume       what a run has to have loaded to go on, and saves: checkpoints and all beside the learner's state
    progress     the bar on the terminal, the table in a notebook
    callbacks    objects of the user's that are called during a run
    lock         the mark of a run folder, and the lock on it while a run writes there
    inputs       what a run reads, which may not lie in its folder
    same_run     what a resumed run must have in common with the checkpoint: fields, rows, rewards, length
    stop_signals Ctrl-C, SIGTERM and SIGHUP: the end after a whole step
    trackers     tensorboard, wandb, trackio: numbers, and tables of completions with their images

To add a file that a run writes: its path in RunPaths, its name in `folder.FILES`.
"""
