"""What a run leaves behind: its folder, and everything in it that can be read without the trainer.

    folder       RunFolder: what the trainer holds; a new run, or one that is there already
    paths        RunPaths: where each file is
    environment  environment.json: the versions and the machine
    metrics      metrics.jsonl: one object a step
    rollout_log  rollouts/step-000001.jsonl and rollouts/images/
    checkpoint   checkpoints/step-000010: what a killed run needs to go on
    resuming     what a resume refuses: other rows, other sets
    summary      summary.json: the run in a few numbers
    report       report.html, made from the folder alone; charts draws its curves
    step_metrics what a step's completions and rewards look like in numbers
    evaluation   how often the model answers a set of rows right
    setup        both sides of a run, loaded: learner and engine
    parity       do engine and learner see the same tokens, images and weights
    sync         the weight sync, verified twice
    doctor       `mm-grpo doctor`: parity before and after a real update; doctor_table prints it
    quiet        stdout for an answer alone
    checking     `mm-grpo check`: what a run would stumble over
    progress     the bar on the terminal
    trackers     tensorboard, wandb, trackio
    atomic       the one way in which whole files and folders are written

To add a file that a run writes: its path in RunPaths, and its line in `folder.remove_run`.
"""
