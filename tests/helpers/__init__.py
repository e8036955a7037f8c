"""Helpers that several folders of tests share, by task. Each module's docstring says more.

To train something small::

    configs         small_config(...): the one builder of small configs
    tiny            tiny random models, pictures and samples
    small_runs      runs of a tiny model on six rows, in this process
    run_folders     configs of runs on rendered shapes, and readers of a run's folder
    finished_runs   finished runs of which the best evaluation is not the last
    runs            folders of runs that are made up, for code that only reads them
    ahead           runs whose engine samples while the learner works
    demo            the outcome that the shapes demo must have
    recipe_scripts  the scripts of the recipes, as modules

To test the learner::

    families        the table of model families: a new family is one line
    steps           four groups of one step, and transformers' own log-probabilities of them
    passes          a pass over packs with gradients, and counters of the model's calls
    conversations   conversations of random turns with images, and transformers' forward of them

To stand in for an engine, a server or a tool::

    fake_engines    engines with a copy of the weights, correct ones and ones that fail in silence
    scripted        an engine whose texts are written by the test
    fake_vllm       a vLLM server over HTTP without a model; fake_server_process: the same as a program
    chat_server     an OpenAI-compatible server that delays, drops and limits
    openenv_server  a server of the OpenEnv protocol that fails on request
    calling         a processor with which a tiny model calls tools
    waiting_tools   tools in worker processes that wait for each other
    browser         headless Chromium, and a server of pages

To start processes and wait for them::

    processes       scripts as several ranks, as torchrun starts them
    forkserver      Python programs that start in milliseconds, as forks of one process with the imports done
    sessions        worker processes, and whether they ended
    patience        how long a test waits; every wait has a deadline
    workers         tests that stay in one process of `pytest -n 2`

To look at the tests and docs themselves::

    documents       pages, their blocks and commands, and the files that the README has a reader write
    mutations       the table of mutations, and whether the tests catch each
    metrics_page    names in docs/metrics.md
    slips           mistakes that type checkers find in users' programs
"""
