"""Words of shell scripts: variables in their order, quotes, arrays, and what is unknown because nothing is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mm_grpo.errors import ConfigError
from mm_grpo.migrate.files import Unexpanded, read_foreign
from mm_grpo.migrate.shell import UNKNOWN, commands


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=1\nB=x$A\nrun $B ${A}2 \"$B $A\" '$A' \\$A", ["x1", "12", "x1 1", "$A", "$A"]),
        ("A=1\nB=x$A\nA=2; run $B $A", ["x1", "2"]),
        ('A="two words"; run $A "$A"', ["two", "words", "two words"]),
        ("A=; run ${A:-one} ${B:-two} ${C:-${B:-three}} ${1:-four} $A", ["one", "two", "three", "four"]),
        ('D=(\n  a=1  # one )\n  "b c"\n)\nD+=(d)\nrun "${D[@]}" "$@"', ["a=1", "b c", "d"]),
        ('A="--x 1"\nA+=" --y 2"\nrun $A', ["--x", "1", "--y", "2"]),
        ("N=6; run $((N * (2 + 1) - $N / 4)) $HOME/x", ["17", "~/x"]),
        ('run a#b "c # d" \\\n  e # f\n', ["a#b", "c # d", "e"]),
        ("run a 2>&1 | tee log.txt", ["a"]),
        ("cat <<'END'\nit's $no word\nEND\nrun a", ["a"]),
        ("export A=1\r\nrun $A \\\r\n  b\r\n", ["1", "b"]),
        ('run "costs \\$5" \'costs $5\' 5$', ["costs $5", "costs $5", "5$"]),
        ("A=1\nif [ $A = 1 ]; then\n  A=2\nfi\nrun ${A:-3}", ["$A".join(UNKNOWN)]),
        ('D=(a)\nif x; then D+=(b); fi\nrun "${D[@]}"', ["a", "$D".join(UNKNOWN)]),
        ("run --o <OUT-DIR> a < in > out", ["--o", "<OUT-DIR>".join(UNKNOWN), "a"]),
        ('run "$(date +%s)/x"', [f"{'$(date +%s)'.join(UNKNOWN)}/x"]),
        ("run $((2 ** 3)) $B", ["$((2 ** 3))".join(UNKNOWN), "$B".join(UNKNOWN)]),
    ],
)  # fmt: skip
def test_words(script: str, words: list[str]) -> None:
    (run,) = [command for command, _ in commands(script) if command[0] == "run"]
    assert run[1:] == words


def test_the_environment_is_what_stands_in_front_or_is_exported() -> None:
    (command, environment), *_ = commands("A=0\nB=2\nexport C=$B A\nA=1 D=4 run $A\n")
    assert command == ["run", "0"] and environment == {"A": "1", "C": "2", "D": "4"}


def test_a_quote_without_end_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text('run --x "' + "$A " * 20_000)
    with pytest.raises(ConfigError, match=r"a.sh: .*line 1"):
        read_foreign(tmp_path / "a.sh")


@pytest.mark.parametrize(
    ("script", "keys"),
    [
        ("pip install x --upgrade\nrun --a 1 --b-c x y, z", {"a": 1, "b_c": ["x", "y", "z"]}),
        ("accelerate launch --num_processes 4 --config_file z.yaml src/grpo.py --a 1",
         {"num_processes": 4, "config_file": "z.yaml", "a": 1}),
        ("LR=1e-6\nMAX_PIXELS=9\nrun --a 1", {"a": 1}),
        ("run --system '[think] costs $5 # now' --modules \"q_proj\", \"v_proj\"",
         {"system": "[think] costs $5 # now", "modules": ["q_proj", "v_proj"]}),
        ("run a.b=1 +c.d=\"['x','y']\" ++e.f=True", {"a.b": 1, "c.d": ["x", "y"], "e.f": True}),
        ("run config=base.yaml data.n=2", {"data.n": 2, "data.m": 3}),
        ("ray job submit --no-wait -- python3 -m x a.b=1 --c 2", {"a.b": 1, "c": 2}),
        ("run \\ \n --a 1 \\\n  # --b 2 \\\n  --c 3", {"a": 1, "c": 3}),
        ("trl vllm-serve --a 1 --b 2 &\nrun --c 3", {"c": 3}),
        ("run a.b=1 $EXTRA", {"a.b": 1, "$EXTRA": "$EXTRA"}),
        ("run config=other.yaml data.n=2", {"config": "other.yaml", "data.n": 2}),
    ],
)  # fmt: skip
def test_options(script: str, keys: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data: {n: 1, m: 3}")
    (tmp_path / "a.sh").write_text(script)
    assert read_foreign(tmp_path / "a.sh") == keys


def test_a_value_that_the_script_does_not_say_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text('run --out "$SCRATCH/x" --names a $B')
    out, names = read_foreign(tmp_path / "a.sh").values()
    assert isinstance(out, Unexpanded) and (str(out), out.unknown) == ("$SCRATCH/x", "$SCRATCH")
    assert isinstance(names, Unexpanded) and names.unknown == "$B"
