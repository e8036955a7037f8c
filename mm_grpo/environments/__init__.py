"""Environments: what a conversation of several turns talks to, tools and environments that answer in text and images.

    observation  what a tool answered, in one form: texts, images, or why there is no answer
    session      the user's side of one conversation: its environment, its tools, and a plain answer of each call
    host         conversations and their calls, with a deadline: what a failure means, and calls in this process
    workers      a host whose calls are made in processes that can be killed
    worker       what runs in those processes
    toolbox      the tools of a run: their schemas for the chat template, and the host that calls them
    factories    what makes environments: classes by name or address, and OpenEnv servers
    builtins     `Zoom`
    own_tools    environments that name their tools themselves, with JSON schemas
    openenv      environments on an OpenEnv server

A tool is a plain function, an environment a class with `reset` whose other public methods are tools, as TRL's
`environment_factory` has them. The turns themselves are rollout/turns.py's affair.
"""
