"""Environments: what a conversation of several turns talks to, tools and environments that answer in text and images.

    observation  what a tool answered, in one form: texts, images, or why there is no answer
    toolbox      the tools of a run: their schemas for the chat template, and one `Episode` for each conversation
    builtins     `Zoom`, `Rotate` and `GridWorld`

A tool is a plain function, an environment a class with `reset` whose other public methods are tools, as TRL's
`environment_factory` has them. The turns themselves are rollout/turns.py's affair.
"""
