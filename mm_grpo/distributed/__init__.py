"""Several processes that train together.

ranks           rank, world size and object collectives; `start` joins the processes
launch          `--processes N`: the processes of this machine, started by torch's elastic launcher
ray_launch      `--ray ADDRESS`: the processes of a run, and servers, on the hosts of a Ray cluster
accelerate_env  what `accelerate launch` was configured with, compared with the config
exit_message    one message on the terminal for one failure
"""
