"""Environments: tools and environments for conversations of several turns, which answer in text and images.

    observation  a tool's answer: texts, images, or a fault
    session      environment and tools of one conversation, and the result of each call
    host         conversations and their calls: deadlines, policies for failures, calls in this process
    workers      a host that makes calls in processes that can be killed
    worker       the code of these processes
    toolbox      the tools of a run: their schemas for the chat template, and the host that calls them
    factories    factories of environments: classes by name or address, and OpenEnv servers
    builtins     `Zoom`
    own_tools    environments that list their tools with JSON schemas
    openenv      environments on an OpenEnv server

A tool is a plain function. An environment is a class with `reset` whose other public methods are tools, as in TRL's
`environment_factory`. Not here: the turns of a conversation (rollout/turns.py).
"""
