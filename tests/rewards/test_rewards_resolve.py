import hashlib
import importlib.metadata

import pytest
from reward_entries import FILE, fails

from mm_grpo.rewards import entry_point_names, resolve_entries, resolve_entry, reward
from mm_grpo.rewards.resolve import describe_code

OWN = """
from mm_grpo.rewards import reward

@reward("iou_own", weight=2.0, needs=("box",))
def iou(completion, box, *, threshold=None):
    return 1.0

def plain(completions, **kwargs):
    return [0.0 for _ in completions]

class Judge:
    @staticmethod
    def score(completion):
        return 3.0

def typed(completion, *, longest: int | None = 40, loose=1):
    return 1.0
"""
BROKEN = {"divides.py": "x = 1\ny = x / 0\n", "open.py": "def f(:\n", "exits.py": "raise SystemExit(0)\n"}


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"own.py": OWN, **BROKEN}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


class Point:
    def __init__(self, name, value, fn):
        self.name, self.value, self.fn = name, value, fn

    def load(self):
        if isinstance(self.fn, Exception):
            raise self.fn
        return self.fn


@pytest.fixture
def points(monkeypatch):
    held: list[Point] = []

    def entry_points(*, group, name=None):
        assert group == "mm_grpo.rewards"
        return [point for point in held if name in (None, point.name)]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    return held


def test_a_name_and_a_mapping():
    assert resolve_entry("exact_match").weight == 1.0
    spec = resolve_entry({"name": "length", "weight": 0.25, "as": "short", "max_length": 9})
    assert (spec.name, spec.weight, spec.bound) == ("short", 0.25, {"max_length": 9})
    assert resolve_entry("length").bound == {}  # the registered one is as it was


def test_a_file(own):
    spec = resolve_entry("own.py:iou")
    assert (spec.name, spec.weight, spec.needs, spec.source) == ("iou_own", 2.0, ("box",), "own.py:iou")
    assert resolve_entry("./own.py:iou").fn is spec.fn  # loaded once
    assert resolve_entry("own.py:plain").name == "plain"
    assert resolve_entry("own.py:Judge.score").fn("x") == 3.0
    assert resolve_entry({"name": "own.py:iou", "as": "near", "threshold": 0.5}).name == "near"


def test_a_file_that_changed_is_loaded_again(own):
    old = resolve_entry("own.py:iou")
    (own / "own.py").write_text(OWN.replace("return 1.0", "return 7.0"))
    new = resolve_entry("own.py:iou")
    assert (old.fn("", None), new.fn("", None)) == (1.0, 7.0)
    source = OWN.replace("return 1.0", "return 7.0").split("\n\n")[1] + "\n"
    assert describe_code(new.fn)["sha256"] == hashlib.sha256(source.encode()).hexdigest()


def test_an_entry_point(points):
    def judge(completion):
        return 1.0

    points.append(Point("pack_judge", "pack.rewards:judge", judge))
    spec = resolve_entry("pack_judge")
    assert (spec.name, spec.source) == ("pack_judge", "entry point pack.rewards:judge")
    assert resolve_entry({"name": "pack_judge", "as": "j"}).name == "j"
    assert entry_point_names() == ["pack_judge"]
    with fails("unknown reward 'pack_juge'; did you mean 'pack_judge'"):
        resolve_entry("pack_juge")


def test_a_callable_is_as_it_was_decorated():
    @reward("mine", weight=3.0)
    def one(completion):
        return 1.0

    def two(completion):
        return 1.0

    assert (resolve_entry(one).name, resolve_entry(one).weight) == ("mine", 3.0)
    assert (resolve_entry(two).name, resolve_entry(two).weight) == ("two", 1.0)
    assert resolve_entry({"name": lambda completion: 1.0, "as": "three", "weight": 2}).name == "three"
    spec = resolve_entry(two)
    assert resolve_entry(spec) is spec


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"weight": 1}, "`name`"),
        ({"name": "length", "max_lenght": 9}, "did you mean 'max_length'"),
        (3, "3 is not a reward"),
        ("own.py", "own.py:function"),
        ("own.py:plane", "did you mean 'plain'"),
        ("no_such_module_here:f", "ModuleNotFoundError"),
        (f"{FILE}:Opaque", "Opaque' is a class whose objects cannot be called"),
        ({"name": f"{FILE}:Judge", "marks": 1}, "no setting 'marks'; did you mean 'mark'"),
        ({"name": "exact_match", "ignore_case": "no"}, "ignore_case = 'no': must be true or false"),
        ({"name": "own.py:typed", "longest": "40"}, "longest = '40': must be an integer or null"),
        ("divides.py:f", "'divides.py:f' cannot be imported: ZeroDivisionError: .* zero at .*divides.py:2$"),
        ("open.py:f", "'open.py:f' cannot be imported: SyntaxError: .* at .*open.py:1$"),
        ("exits.py:f", "'exits.py:f' cannot be imported: SystemExit: 0 at .*exits.py:1$"),
    ],
)
def test_entries_that_mean_nothing(own, entry, named):
    with fails(named):
        resolve_entry(entry)


def test_a_list_has_entries_of_different_names():
    specs = resolve_entries(["length", {"name": "length", "as": "long", "min_length": 5}])
    assert [spec.name for spec in specs] == ["length", "long"]
    for entries, shown in ((lambda completion: 1.0, "<function .*>"), ("length", "'length'")):
        with fails(f"rewards is {shown}; it must be a list"):
            resolve_entries(entries)


def test_the_identity_of_a_function(own):
    plain = resolve_entry("own.py:plain").fn
    source = "def plain(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
    sha256, whole = (hashlib.sha256(text.encode()).hexdigest() for text in (source, OWN))
    identity = {"module": "own", "qualname": "plain", "sha256": sha256, "file_sha256": whole}
    assert describe_code(plain) == identity
    scope = {"__name__": "typed"}
    exec("def f(completion): return 1.0", scope)
    nothing = {"sha256": None, "file_sha256": None}
    assert describe_code(scope["f"]) == {"module": "typed", "qualname": "f", **nothing}
    judge = describe_code(resolve_entry(f"{FILE}:judge").fn)  # an object, by its class
    assert judge["qualname"] == "Judge" and len(judge["sha256"]) == 64
