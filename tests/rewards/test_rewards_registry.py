import functools
import subprocess
import sys

import pytest
from reward_entries import fails

from mm_grpo.rewards import get, reward
from mm_grpo.rewards.resolve import resolve_entries
from mm_grpo.rewards.spec import make_spec


def test_the_decorator_returns_the_function_unchanged_and_registers_it():
    def short(completion, box, label=None, *, limit=3, **columns):
        return float(len(columns))

    assert reward("brief", weight=0.5, needs=("box",))(short) is short
    spec = get("brief")
    assert (spec.fn, spec.weight, spec.needs, spec.kind) == (short, 0.5, ("box",), "completion")
    assert (spec.required, spec.optional, spec.config_only) == (("completion", "box"), ("label",), ("limit",))
    assert spec.takes_kwargs and not spec.is_async and spec.source == "registered"
    assert spec.settable == ("box", "label", "limit")


def test_the_bare_decorator_takes_the_functions_name():
    @reward
    async def arbiter(completions, **kwargs):
        return [1.0 for _ in completions]

    spec = get("arbiter")
    assert (spec.name, spec.kind, spec.is_async, spec.weight) == ("arbiter", "batch", True, 1.0)


def test_a_name_is_held_by_one_function():
    @reward("mine")
    def one(completion):
        return 1.0

    with fails(r"reward 'mine' is already registered by .*\.one, so .*\.two cannot"):

        @reward("mine")
        def two(completion):
            return 1.0

    with fails("reward 'format' is already registered by mm_grpo.rewards.builtins.shaping.follows_format"):
        reward("format")(one)


def test_a_notebook_cell_that_runs_twice_registers_twice():
    cell = "@reward\ndef mine(completion):\n    return {}\n"
    for score in (1.0, 2.0):
        exec(cell.format(score), {"reward": reward, "__name__": "__main__"})
    assert get("mine").fn("x") == 2.0


@pytest.mark.parametrize(
    ("function", "name", "settings", "message"),
    [
        (lambda completion, completions: 1.0, "f", {}, r"\(completion, completions\)"),
        (lambda answer, **kwargs: 1.0, "f", {}, r"'f': needs either.* \(answer\)"),
        (lambda predict_str, ground_truth: 1.0, "f", {}, "solution_str .* is completion here"),
        (lambda completion: 1.0, "f", {"weight": float("nan")}, "reward 'f': weight is nan"),
        (lambda completion: 1.0, "f", {"needs": "box"}, "a tuple of column names, not the string 'box'"),
        (lambda completion: 1.0, "a b", {}, "reward name 'a b' .*is not legal"),
    ],
)
def test_what_the_decorator_refuses(function, name, settings, message):
    with fails(message):
        reward(name, **settings)(function)


def test_a_lambda_is_called_lambda():
    assert make_spec(lambda completion: 1.0).name == "lambda"
    with fails("lambda"):  # two of them would share their metrics
        resolve_entries([lambda completion: 1.0, lambda completion: 2.0])


def test_objects_methods_partials_and_wrapped_functions():
    class Judge:
        async def __call__(self, completions, **kwargs):
            return [0.0]

        def near(self, completion, box, *, threshold=0.5):
            return 1.0

    def plain(completion, threshold=0.5, label=None):
        return 1.0

    @functools.wraps(Judge.__call__)
    def wrapped(*args, **kwargs):
        return Judge()(*args, **kwargs)

    judge = make_spec(Judge())
    assert (judge.name, judge.kind, judge.is_async) == ("Judge", "batch", True)
    near = make_spec(Judge().near)
    assert (near.name, near.required, near.config_only) == ("near", ("completion", "box"), ("threshold",))
    part = make_spec(functools.partial(plain, threshold=0.9))
    assert (part.name, part.optional, part.config_only) == ("plain", ("label",), ("threshold",))
    assert part.bound == {"threshold": 0.9}
    assert make_spec(wrapped, name="w").is_async


HEAVY = {"torch", "vllm", "numpy", "PIL", "datasets", "transformers"}
BEFORE_ONE_IS_NAMED = {"asyncio", "ruamel.yaml", "mm_grpo.config.grpo_config", "mm_grpo.rewards.builtins"}
OF_BUILT_INS = {"rapidfuzz", "jsonschema", "openai", "math_verify", "httpx", "sympy"}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import mm_grpo.rewards", HEAVY | BEFORE_ONE_IS_NAMED),
        ("from mm_grpo.rewards import registry; [registry.get(n) for n in registry.BUILTINS]", HEAVY | OF_BUILT_INS),
    ],
)  # fmt: skip
def test_rewards_and_all_built_ins_import_no_heavy_library(statement, absent):
    counted = "print(len(sys.modules) - before, *sys.modules)"
    code = f"import sys; before = len(sys.modules); {statement}; {counted}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, *loaded = run.stdout.split()
    assert absent.isdisjoint(loaded)
    assert int(count) < 300  # 180 modules, a hundred of them pydantic's, are read in 0.1 s


def test_kwargs_that_the_body_reads_are_told_from_idle_ones():
    def idle(completions, **kwargs):
        return [1.0 for completion in completions if completion]

    def in_a_lambda(completions, **kwargs):
        return sorted(completions, key=lambda text: kwargs["answer"])

    wrapper = functools.wraps(idle)(lambda *args, **options: in_a_lambda(*args, **options))
    fns = (idle, functools.partial(idle), in_a_lambda, wrapper)
    assert [make_spec(fn, name="r").takes_kwargs for fn in fns] == [False, False, True, True]
