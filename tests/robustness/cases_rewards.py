"""Rewards that answer with nonsense, hang, die or change the process, through `mm-grpo train` in a process of its own.

Two steps of six completions. An isolated reward runs in worker processes, and whatever it does ends one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import robustness.run_case as by
from robustness.cases import Call, add
from robustness.whole_runs import write_config

ISOLATED: Mapping[str, Any] = {"isolated": True, "max_concurrency": 1}
MASK: Mapping[str, Any] = {"on_error": "mask"}
GOOD = "def good(completion):\n    return float(len(completion) % 3)\n"
REGEX = "import re\ndef f(completion):\n    return float(re.match('(a|aa)+$', 'a' * 60 + 'b') is not None)\n"


def body(text: str, head: str = "completion") -> str:
    """A reward of these lines; `SCORE` is what it would have answered without them."""
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    return f"import os, random, signal, subprocess, sys, threading, time\ndef f({head}):\n{lines}".replace(
        "SCORE", "float(len(completion) % 3)"
    )


def trained(
    content: str, check: Callable[[Path], Any] = lambda folder: None, **options: Any
) -> Callable[[Path], Call]:
    def make(folder: Path) -> Call:
        (folder / "r.py").write_text(content)
        run = {"max_steps": 2, "save_model": False}
        config = write_config(folder, rewards=[{"name": "r.py:f", **options}], run=run)
        by.start_forks()

        def call() -> None:
            by.process(["-m", "mm_grpo.cli", "train", config], folder)
            check(folder)

        return call

    return make


def one_row_a_step(folder: Path) -> None:
    rows = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2, rows


def is_gone(folder: Path) -> None:
    """The process whose id the reward wrote has ended with the run."""
    pid = int((folder / "pid").read_text())
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z", f"process {pid} is left"


# answers that are no scores

for name, answer, words in [
    ("NaN", "float('nan')", "nan"),
    ("infinity", "float('inf')", "inf"),
    ("minus infinity", "-1e999", "inf"),
    ("a text", "'1.0'", "'1.0'"),
    ("an integer of 400 digits", "10 ** 400", "finite"),
    ("an integer of 5000 digits", "10 ** 5000", "finite"),
    ("a list", "[1.0]", "finite"),
    ("an empty list", "[]", "finite"),
    ("a mapping", "{'score': 1.0}", "finite"),
    ("a complex number", "1j", "finite"),
    ("a function", "len", "finite"),
    ("an array of two", "__import__('numpy').ones(2)", "finite"),
    ("a tensor of NaN", "__import__('torch').tensor(float('nan'))", "nan"),
    ("an object that cannot be shown", "type('X', (), {'__repr__': lambda self: 1 / 0})()", "finite"),
    ("a generator", "(x for x in [1.0])", "finite"),
    ("a coroutine", "__import__('asyncio').sleep(0)", "finite"),
]:
    add(f"rewards: an answer of {name}", trained(body(f"return {answer}")), "reward 'f'", words, heavy=True)
for name, answer, words in [
    ("one short", "[1.0] * (len(completions) - 1)", "5"),
    ("one more", "[1.0] * (len(completions) + 1)", "7"),
    ("none", "None", "list"),
    ("a number", "1.0", "list"),
    ("a text", "'1' * len(completions)", "list"),
    ("a NaN among them", "[float('nan')] + [1.0] * (len(completions) - 1)", "nan"),
    ("an endless iterator", "__import__('itertools').repeat(1.0)", "list"),
]:
    content = body(f"return {answer}", "completions, **kwargs")
    add(f"rewards: a batch's answer of {name}", trained(content), "reward 'f'", words, heavy=True)

# exceptions

for name, raised, code, words in [
    ("of its own", "raise RuntimeError('boom')", 2, ("boom", "r.py:3")),
    ("of its own class, past Exception", "raise type('Odd', (BaseException,), {})('boom')", 2, ("boom",)),
    ("by sys.exit(0)", "sys.exit(0)", 2, ("SystemExit",)),
    ("by sys.exit of a text", "sys.exit('bye')", 2, ("bye",)),
    ("KeyboardInterrupt", "raise KeyboardInterrupt", 130, ("interrupted",)),
    ("GeneratorExit", "raise GeneratorExit", 2, ("GeneratorExit",)),
    ("StopIteration", "raise StopIteration", 2, ("StopIteration",)),
    ("MemoryError", "raise MemoryError", 2, ("MemoryError",)),
    ("by endless recursion", "return f(completion)", 2, ("RecursionError",)),
    ("whose text raises", "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()", 2, ("Odd",)),
    ("of control characters", "raise ValueError('\\x1b[31m\\x00red')", 2, ("\\x1b[31m\\x00red",)),
    ("of ten million characters", "raise ValueError('x' * 10_000_000)", 2, ("xxx",)),
    ("of half a character", "raise ValueError('\\ud83d')", 2, ("\\ud83d",)),
]:
    add(f"rewards: an exception {name}", trained(body(raised)), *words, code=code, heavy=True)
    if "KeyboardInterrupt" not in name:
        add(f"rewards: an exception {name}, isolated", trained(body(raised), **ISOLATED), *words, heavy=True)
add(
    "rewards: an exception KeyboardInterrupt, isolated",
    trained(body("raise KeyboardInterrupt"), **ISOLATED),
    "KeyboardInterrupt",
    heavy=True,
)
add(
    "rewards: an exception for every row, masked",
    trained(body("raise ValueError('boom')"), **MASK),
    "masked",
    code=3,
    heavy=True,
)
add(
    "rewards: an exception for some rows, masked",
    trained(body("if len(completion) % 3 == 1: raise ValueError('boom')\nreturn SCORE"), **MASK),
    "completions masked",
    "boom",
    code=0,
    heavy=True,
)

# what takes long

HANG = "time.sleep(3600)"
HANG_FOR_SOME = "if len(completion) % 3 == 1: time.sleep(3600)\nreturn SCORE"
LATE_MASKED: Mapping[str, Any] = {**ISOLATED, "on_timeout": "mask"}
LATE = "had not answered after timeout"
STUBBORN = (
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + HANG
)
ENDLESS = "import asyncio\nasync def f(completion):\n    await asyncio.sleep(3600)\n"
UNCANCELLED = (
    "import asyncio\nasync def f(completion):\n    while True:\n        try:\n            await asyncio.sleep(3600)\n"
    "        except asyncio.CancelledError:\n            pass\n"
)
BLOCKING = "import time\nasync def f(completion):\n    time.sleep(3600)\n"
for name, content, options, code, words in [
    ("a sleep", body(HANG), {}, 2, (LATE,)),
    ("a loop", body("while True: pass"), {}, 2, (LATE,)),
    ("a lock that is never released", body("threading.Lock().acquire() and threading.Event().wait()"), {}, 2, (LATE,)),
    ("a regular expression", REGEX, {}, 1, ("r.py",)),
    ("a sleep, isolated", body(HANG), ISOLATED, 2, (LATE,)),
    ("a loop, isolated", body("while True: pass"), ISOLATED, 2, (LATE,)),
    ("a regular expression, isolated", REGEX, ISOLATED, 2, (LATE,)),
    ("a sleep without signals, isolated", body(STUBBORN), ISOLATED, 2, (LATE,)),
    ("a stopped process, isolated", body("os.kill(os.getpid(), signal.SIGSTOP)"), ISOLATED, 2, (LATE,)),
    ("a wait for input, isolated", body("return float(len(input()))"), ISOLATED, 2, ("EOF",)),
    ("an async call without end", ENDLESS, {}, 2, (LATE,)),
    ("an async call that takes no cancelling", UNCANCELLED, {}, 2, ("event loop",)),
    ("an async call that blocks", BLOCKING, {}, 2, ("event loop",)),
    ("an async call without end, isolated", ENDLESS, ISOLATED, 2, (LATE,)),
    ("a sleep, masked", body(HANG), LATE_MASKED, 3, ("masked",)),
    ("a sleep for some rows, masked", body(HANG_FOR_SOME), LATE_MASKED, 0, ("masked",)),
]:  # fmt: skip
    add(
        f"rewards: past its time-out, {name}",
        trained(content, **{"timeout": 1.0, **options}),
        *words,
        code=code,
        heavy=True,
    )

# the end of a process

SEGFAULT = "import ctypes\nctypes.string_at(0)"
for name, text, code, words, isolated in [
    ("a segmentation fault", SEGFAULT, 139, ("Segmentation fault",), ("SIGSEGV",)),
    ("os.abort", "os.abort()", 134, ("Aborted",), ("SIGABRT",)),
    ("os._exit(0)", "os._exit(0)", 2, ("os._exit(0)",), ("exited with code 0",)),
    ("os._exit(3)", "os._exit(3)", 2, ("os._exit(3)",), ("exited with code 3",)),
    ("SIGKILL to itself", "os.kill(os.getpid(), signal.SIGKILL)", 137, ("Killed",), ("SIGKILL",)),
]:
    add(f"rewards: ended by {name}", trained(body(text)), *words, code=code, heavy=True)
    add(f"rewards: ended by {name}, isolated", trained(body(text), **ISOLATED), *isolated, heavy=True)
add(
    "rewards: ended by a fault for every row, isolated and masked",
    trained(body(SEGFAULT), **ISOLATED, **MASK),
    "masked",
    code=3,
    heavy=True,
)
add(
    "rewards: ended by SIGKILL to its group, isolated",
    trained(body("os.killpg(0, signal.SIGKILL)"), **ISOLATED),
    "SIGKILL",
    heavy=True,
)
add(
    "rewards: ended by SIGKILL to its parent, isolated",
    trained(body("os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(9)"), **ISOLATED, timeout=10.0),
    "reward 'f'",
    heavy=True,
)
add(
    "rewards: all files closed, isolated",
    trained(body("os.closerange(0, 1000)\nreturn SCORE"), **ISOLATED, timeout=5.0),
    "reward 'f'",
    heavy=True,
)
for name, text in {
    "a list of 10 GB": "x = [0] * (10 ** 10 // 8)\nreturn SCORE",
    "text without end": "x = 'x'\nwhile True: x += x",
    "bytes of the size of a disk": "return float(len(bytes(2 ** 42)))",
}.items():
    add(
        f"rewards: past its memory, {name}",
        trained(body(text), **ISOLATED, memory_limit="300MB"),
        "MemoryError",
        "memory_limit",
        heavy=True,
    )

# what it leaves behind, or changes

THREAD = "threading.Thread(target=time.sleep, args=(3600,){}).start()"
CHILD = "open('pid', 'w').write(str(subprocess.Popen(['sleep', '3600']).pid))"
CLEARED = "print('\\x1b[2J\\x00', flush=True)"
IGNORED = (
    "if threading.current_thread() is threading.main_thread(): signal.signal(signal.SIGINT, signal.SIG_IGN)"
)
BACK = "the fork came back"
for name, text, options, words, check in [
    ("a daemon thread", THREAD.format(", daemon=True"), {}, (), one_row_a_step),
    ("a thread", THREAD.format(""), {}, (), one_row_a_step),
    ("a thread, with a time-out", THREAD.format(""), {"timeout": 9.0}, (), one_row_a_step),
    ("a thread, isolated", THREAD.format(""), ISOLATED, (), one_row_a_step),
    ("a process, isolated", CHILD, ISOLATED, (), is_gone),
    ("a fork that goes on", "os.fork()", {}, (BACK,), one_row_a_step),
    ("a fork that goes on, isolated", "os.fork()", ISOLATED, (BACK,), one_row_a_step),
    ("a fork that exits", "if not os.fork(): os._exit(0)", {}, (), one_row_a_step),
    ("a fork that sleeps, isolated", "if not os.fork(): time.sleep(3600)", ISOLATED, (), one_row_a_step),
    ("another working folder", "os.chdir('/')", {}, ("the working folder",), one_row_a_step),
    ("another working folder, isolated", "os.chdir('/')", ISOLATED, (), one_row_a_step),
    ("no gradients", "import torch; torch.set_grad_enabled(False)", {}, ("gradient mode",), one_row_a_step),
    ("half precision", "import torch; torch.set_default_dtype(torch.half)", {}, ("dtype",), one_row_a_step),
    ("other random numbers", "random.seed(0)", {}, (), one_row_a_step),
    ("control characters on the terminal", CLEARED, {}, (), one_row_a_step),
    ("control characters on the terminal, isolated", CLEARED, ISOLATED, (), one_row_a_step),
    ("a closed sys.stdout, isolated", "sys.stdout.close()", ISOLATED, (), one_row_a_step),
    ("an ignored Ctrl-C", IGNORED, {}, (), one_row_a_step),
]:  # fmt: skip
    content = body(f"{text}\nreturn SCORE")
    add(f"rewards: leaves {name}", trained(content, check, **options), *words, code=0, heavy=True)
add(
    "rewards: removes the run folder",
    trained(body("import shutil\nshutil.rmtree('out', ignore_errors=True)\nreturn SCORE")),
    "run.dir",
    heavy=True,
)
add("rewards: the same for every completion", trained(body("return 0.5")), "no update", code=3, heavy=True)
add("rewards: none for every completion", trained(body("return None")), "no update", code=3, heavy=True)
