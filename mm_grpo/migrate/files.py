"""The file that `mm-grpo convert` reads: YAML, JSON, a shell script, or a Python script with `GRPOConfig(...)`.

A command line gives `--key value`, verl's `section.key=value`, and variables of the environment such as MAX_PIXELS=...
Its options are laid over the file that `--config FILE` or EasyR1's `config=FILE` names. Of a Python script the literal
arguments of CALLS are read. Nothing is run.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.config.yaml_file import read_value, read_yaml, refuse_long
from mm_grpo.errors import ConfigError
from mm_grpo.files import read_regular_file
from mm_grpo.migrate.keys import ADVICE, PROGRAMS, by_end
from mm_grpo.migrate.shell import UNKNOWN, commands

ENVIRONMENT = (
    "MAX_PIXELS MIN_PIXELS NPROC_PER_NODE NNODES CUDA_VISIBLE_DEVICES IMAGE_MAX_TOKEN_NUM FPS FPS_MAX_FRAMES NFRAMES"
    " FPS_MIN_FRAMES VIDEO_MAX_PIXELS VIDEO_MIN_PIXELS VIDEO_TOTAL_PIXELS VIDEO_MAX_TOKEN_NUM VIDEO_MIN_TOKEN_NUM"
)
"""Variables of the environment that a trainer reads."""
LAUNCHERS = {"accelerate", "torchrun", "deepspeed", "torch.distributed.run", "torch.distributed.launch"}
SERVERS = {"rollout", "deploy", "serve", "vllm-serve", "export", "infer", "sample", "echo", "printf"}
"""Commands that train nothing."""
CALLS: Mapping[str, Mapping[str, str]] = {
    "GRPOConfig": {},
    "RLHFArguments": {},
    "LoraConfig": (_LORA := {"r": "lora_r", "target_modules": "lora_target_modules"}),
    "get_peft_model": _LORA,
    "GRPOTrainer": {"model": "model_name_or_path", "args": "", "peft_config": ""},
    "from_pretrained": {"fast_inference": "use_vllm", "max_seq_length": "vllm_max_model_len"}
    | dict.fromkeys(("model", "model_name", "pretrained_model_name_or_path"), "model_name_or_path"),
}
"""Calls of a Python script whose arguments are read, with the options that scripts have for them ("" is none)."""


class Unexpanded(str):
    """Text of a value that the file alone does not say, such as `$NAME/out` or a name of a Python script."""

    @property
    def unknown(self) -> str:
        """The first part that is not known."""
        match = re.search(r"\$\(.*\)|\$\{[^}]*\}?|\$\S\w*|`.*`|<[^>]*>", self, re.DOTALL)
        return match[0] if match else str(self)


def read_foreign(path: str | Path) -> dict[str, Any]:
    """Return the keys of a file by dotted name. Raises ConfigError if it has none, or is of another program."""
    path = Path(path)
    words: list[str] = []
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        keys = flatten(read_yaml(path))  # JSON is YAML
    else:
        try:
            text = read_regular_file(path).decode("utf-8-sig")
            refuse_long(text, str(path))
            if path.suffix.lower() == ".ipynb":
                cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
                text = "\n".join("".join(cell["source"]) for cell in cells)
            if path.suffix.lower() in (".py", ".ipynb"):
                text = re.sub(r"(?m)^[!%].*", "", text)  # a notebook's commands
                keys = flatten(_call_arguments(ast.parse(text)))
            else:
                words, keys = _command_options(text, path)
        except (OSError, ValueError, SyntaxError, LookupError, TypeError) as error:
            raise ConfigError(f"{path}: cannot be read as a script ({error})") from None
    marks = {*keys, *words, *(key.partition(".")[0] for key in keys)}
    marks |= {f"{key}={value}" for key, value in keys.items()}
    for program, names in PROGRAMS.items():
        if sign := next((name for name in names.split() if name in marks), None):
            advice = "begin with `mm-grpo init`, and write its settings into that config"
            if program == "mm_grpo itself":
                advice = "`mm-grpo check` and `mm-grpo train` take it as it is"
            reads = "convert reads configs for GRPO of TRL, ms-swift, verl and EasyR1"
            raise ConfigError(f"{path}: is of {program} ({sign}); {reads}: {advice}")
    if not keys:
        raise ConfigError(
            f"{path}: holds no key; what is read is YAML, JSON, shell commands with --key value, GRPOConfig(...) in "
            "a Python script: write the arguments of its config into a .yaml file, as key: value"
        )
    return keys


def flatten(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return values by dotted key. Mappings that are values themselves stay."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{section}.{key}" if section else str(key)
        is_value = re.search(r"columns$|(template|init|generation|scheduler|reward|function)_kwargs$", path)
        nested = isinstance(value, Mapping) and value and not is_value
        flat |= flatten(value, path) if nested else {path: value}
    return flat


def _call_arguments(tree: ast.Module) -> dict[str, Any]:
    """Return the arguments of CALLS and what is set on a config; names stand for literals that they are given once."""
    nodes = [*ast.walk(tree)]
    stores = Counter(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    assigns = [(node.targets[0], node.value) for node in nodes if isinstance(node, ast.Assign)]
    named = {n.id: value for n, value in assigns if isinstance(n, ast.Name) and stores[n.id] == 1}
    arguments: list[tuple[str, ast.expr]] = []
    options: dict[str, Any] = {}
    *others, _ = [node for node in nodes if _called(node) == "GRPOConfig"] or [tree]
    if others:
        options["another_command"] = ast.unparse(others[0])
    for call, name in ((node, _called(node)) for node in nodes if node not in others):
        if isinstance(call, ast.Call) and name in CALLS:
            first = [("model", argument) for argument in call.args[:1] if "model" in CALLS[name]]
            keywords = [(k.arg or f"**{ast.unparse(k.value)}", k.value) for k in call.keywords]
            arguments += [(CALLS[name].get(key, key), value) for key, value in first + keywords]
            options |= {"use_peft": True} if "r" in CALLS[name] else {}
    attributes = [(target, value) for target, value in assigns if isinstance(target, ast.Attribute)]
    configs = {name for name, value in named.items() if _called(value) == "GRPOConfig"}
    arguments += [(target.attr, v) for target, v in attributes if ast.unparse(target.value) in configs]
    for key, value in arguments:
        try:
            options[key] = ast.literal_eval(named.get(ast.unparse(value), value))
        except ValueError:  # a model that was loaded before, say, does not hide its name
            text = ast.unparse(value)
            options.setdefault(key, text[6:] if re.fullmatch(r"torch\.\w+", text) else Unexpanded(text))
    options.pop("", None)
    return options


def _called(node: ast.AST | None) -> str:
    """Return the last name of a call, with its class if that is a processor; "" for all else."""
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return re.sub(r"^.*\.(?!from_pretrained)|^.*(?:Model|For).*\.", "", name)


def _command_options(text: str, path: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the words that name the program, and the options, of the command that has the most of them."""
    runs: list[tuple[list[str], dict[str, str]]] = [([], {})]
    pending = [*commands(re.sub(r"[ \t][`^][ \t]*\r?\n", " \\\\\n", text))]  # Windows' continuation
    for words, environment in pending:
        shells = [n for n, word in enumerate(words[:-2]) if Path(word).name in ("bash", "sh")]
        pending += [c for n in shells if words[n + 1] in ("-c", "-lc") for c in commands(words[n + 2])]
        if words[:1] and words[0].startswith("--"):  # cut off by a comment or a space behind a backslash
            runs[-1][0].extend(words)
        elif SERVERS.isdisjoint(words[:4]):
            runs.append((words, environment))
    words, environment = run = max(runs, key=lambda run: _rank(run[0]))
    others = [other for other in runs if other is not run and _rank(other[0])[:2] >= (True, 4)]
    words = words[words.index("--") + 1 :] if "--" in words else words  # as in: ray job submit -- PROGRAM
    programs = [n for n, word in enumerate(words) if re.fullmatch(r"python[\d.]*", Path(word).name)]
    launchers = [n for n, word in enumerate(words) if Path(word).name in LAUNCHERS]
    first = min([*programs, *launchers], default=0)  # behind env, nohup, docker run and their options
    environment |= dict(word.split("=", 1) for word in words[:first] if re.match(r"[A-Z_]+=", word))
    words, start = words[first:], 0
    if launchers:  # its options come first, then the program
        behind = range(launchers[-1] - first + 1, len(words))
        start = next((n for n in behind if words[n].endswith(".py") or words[n - 1] == "-m"), 0)
    names = ENVIRONMENT.split()
    variables = {name.lower(): _value([text]) for name, text in environment.items() if name in names}
    options = _options(words[:start]) | _options(words[start:]) | variables
    options |= {"another_command": " ".join(others[0][0]).strip(UNKNOWN)} if others else {}
    folders = (Path(), *path.resolve().parents[:4])
    files = [folder / str(options["config"]) for folder in folders if "config" in options]
    if file := next(filter(Path.is_file, files), None):
        options = flatten(read_yaml(file)) | options
        del options["config"]
    program = [*itertools.takewhile(lambda word: not _is_option(word), words[start:])]
    is_r1v = any("open_r1" in word for word in program) or "--max_pixels" in words
    if is_r1v and not {"config", "rlhf_type"} & {*options}:
        options["open_r1"] = True
    return [part for word in program for part in (word, *re.split(r"[./]", word))], flatten(options)


def _rank(words: Sequence[str]) -> tuple[bool, int, int, int]:
    """Return how likely a command is the run: it is of GRPO, then its options that are known, and all of them."""
    options = [word.lstrip("+~-").partition("=")[0].replace("-", "_") for word in words if _is_option(word)]
    known = sum(by_end(key, ADVICE, None) is not None for key in options)
    is_grpo = bool(words) and {*PROGRAMS["another stage than GRPO"].split()}.isdisjoint(words[:4])
    return is_grpo, known, len(options), len(words)


def _is_option(word: str) -> bool:
    return re.match(r"--\w|[+~]*[\w@/-]+(\.[\w@/-]+)+=|config=", word) is not None


def _options(words: Iterable[str]) -> dict[str, Any]:
    texts: dict[str, list[str]] = {}
    key, equals = "", "="
    for word in words:
        if _is_option(word):
            key, equals, value = word.lstrip("+~-").partition("=")
            key = key.replace("-", "_") if word.startswith("--") else key
            texts[key] = [value] if equals else []
        elif not equals:
            texts[key].append(word)
        elif texts and UNKNOWN[0] in word:  # options that the script alone does not say
            texts[word.strip(UNKNOWN)] = [word]
        elif re.fullmatch(r"~[\w.]+", word):  # hydra's deletion
            texts[word] = []
    return {key: _value(values) for key, values in texts.items()}


def _value(texts: Sequence[str]) -> Any:
    """Return the value of an option: true without a text, and a list of several."""
    line = " ".join(texts)
    if re.search(f"[{UNKNOWN}]", line):
        return Unexpanded(re.sub(f"[{UNKNOWN}]", "", line))
    if len(texts) > 1:
        return [_value([text.rstrip(",")]) for text in texts]
    try:
        return read_value(line, "option") if texts else True
    except ConfigError:
        return line  # a prompt such as "[think] first", which is no YAML
