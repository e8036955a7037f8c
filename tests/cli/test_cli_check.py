"""`mm-grpo check`: rows and rewards that fail are listed with the row, and the exit code is 2."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.configs import merged
from PIL import Image

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.data.sources import load_train
from mm_grpo.errors import UserError
from mm_grpo.preflight.check import check_config
from mm_grpo.trained.warm_mark import write_mark


@pytest.fixture
def config_path(config_path: Path, tmp_path: Path) -> Path:
    """The config with rows whose answers are colours, built-in rewards, and rewards in a Python file."""
    answers = enumerate(["red", "blue", "red", "green"])
    rows = [{"prompt": "what is it", "image": f"{i}.png", "answer": answer} for i, answer in answers]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "def mine(completion, answer):\n    return float(completion == answer and answer != 'blue')\n"
        "async def ask(completion, answer):\n    return float(completion == answer)\n"
        "def broken(completion, answer):\n    raise RuntimeError('judge is down')\n"
    )
    values = yaml.safe_load(config_path.read_text()) | {"rewards": ["exact_match", "format"]}
    config_path.write_text(yaml.safe_dump(values))
    return config_path


def row_of(out: str, *words: str) -> list[str]:
    """The cells of the one table row that holds all the words."""
    (line,) = [x for x in out.splitlines() if x.startswith("│") and all(word in x for word in words)]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_sound_config_passes_with_a_table_of_scores(command: Any, config_path: Path) -> None:
    result = command("check", config_path)
    assert result.code == 0 and result.out.rstrip().endswith("ok")
    cells = row_of(result.out, "train", "exact_match")
    assert cells == ["train", "exact_match", "1", "4", "1 / 1 / 1", "0 / 0 / 0", "ok"]
    assert "not judged" in row_of(result.out, "train", "format")[6]
    assert not (config_path.parent / "run").exists()
    same = command("check", config_path, f"data.eval={config_path.parent}/rows.jsonl")
    assert same.code == 0 and "eval: 4 of 4 rows" in same.out and not list(config_path.parent.glob("*.html"))


def test_check_and_train_show_the_first_row_before_they_load(command: Any, config_path: Path) -> None:
    shown = ["exact_match reads answer = 'red'", "prompt, images <- image, answer -> exact_match"]
    first, _, _ = command("check", config_path, "--rows", 1).out.partition("┏")
    assert all(f"  {line}" in first for line in shown) and "‹0.png " in first
    _, _, out = command("train", config_path, "run.max_steps=1").out.partition("reading the rows\n")
    prompt, gold, columns = out.partition("loading the weights")[0].splitlines()
    assert "‹0.png›what is it" in prompt and gold.startswith(shown[0]) and columns.startswith(shown[1])


def test_rows_that_are_shared_are_found_by_text_and_pixels(command: Any, config_path: Path) -> None:
    """As another file, format or encoding; one pixel or word makes another row. A page names them too."""
    picture = Image.open(config_path.parent / "0.png").convert("RGB")
    picture.save(config_path.parent / "other.bmp")
    encoded, changed = io.BytesIO(), picture.copy()
    picture.save(encoded, "WEBP", lossless=True)
    changed.putpixel((0, 0), (1, 2, 3))
    changed.save(config_path.parent / "changed.png")
    url = f"data:image/webp;base64,{base64.b64encode(encoded.getvalue()).decode()}"
    texts = ("what is it", "what  is it", "what is it?", "what is it")
    images = ("other.bmp", url, "0.png", "changed.png")
    rows = zip(texts, images, strict=True)
    lines = [json.dumps({"prompt": text, "image": image, "answer": "red"}) for text, image in rows]
    heldout, page = config_path.parent / "held.jsonl", config_path.parent / "page.html"
    heldout.write_text("\n".join(lines))
    result = command("check", config_path, f"data.eval={heldout}", "--page", page)
    sentence = r"eval: 2 of 4 rows are rows of train too, such as \S*held.jsonl:1, which is \S*rows.jsonl:1"
    assert result.code == 0 and re.search(sentence, result.out) and re.search(sentence, page.read_text())
    heldout.write_text("\n".join(lines[2:]))
    assert "rows of train" not in command("check", config_path, f"data.eval={heldout}").out


def test_videos_are_counted_compared_and_refused_by_row(command: Any, config_path: Path) -> None:
    frames, folder = ["0.png", "1.png", "2.png", "3.png"], config_path.parent
    rows: list[dict[str, Any]] = [
        {"prompt": "<image><video>what is it", "image": "0.png", "video": frames, "answer": "red"},
        {"prompt": "what is it", "videos": [{"video": frames, "fps": 1}, frames[::-1]], "answer": "blue"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held.jsonl").write_text(
        json.dumps({**rows[1], "videos": [frames, frames]}) + "\n" + json.dumps(rows[0])
    )
    result = command("check", config_path, f"data.eval={folder}/held.jsonl")
    assert result.code == 0, result.out
    counts = result.out.partition("rewards: scores")[0]
    tables = [row_of(counts, name)[:5] for name in ("train", "eval")]
    assert tables == [["train", "2", "2", "1", "3"], ["eval", "2", "2", "1", "3"]]
    assert "eval: 1 of 2 rows are rows of train too" in result.out
    (folder / "rows.jsonl").write_text(
        json.dumps(rows[0]) + "\n" + json.dumps({"prompt": "?", "video": "no.mp4"})
    )
    result = command("check", config_path)
    assert (
        result.code == 2
        and "rows.jsonl:2: video 'no.mp4'" in result.out
        and "on_bad_media=drop" in result.out
    )


def test_another_form_than_that_of_the_warm_start_is_a_warning(
    command: Any, config_path: Path, models: dict[str, Path]
) -> None:
    model = shutil.copytree(models["qwen2_5_vl"], config_path.parent / "warm")
    config = GRPOConfig.from_yaml(config_path)
    write_mark(model, config, base="b", answer="answer", steps=1, nll=0.1)
    same = command("check", config_path, f"model.path={model}", "--strict")
    assert same.code == 0, same.out
    other = command("check", config_path, f"model.path={model}", "data.system_prompt=Look.", "--strict")
    assert other.code == 2 and "1 warning(s)" in other.out


@pytest.mark.slow
def test_pass_rates_are_printed_and_rows_within_bounds_written(command: Any, config_path: Path) -> None:
    """Red rows are answered right by chance, the others never. An async reward is not judged beforehand."""
    (config_path.parent / "odd.py").write_text(
        "async def odd(completion_ids, completion, answer):\n"
        "    return float(answer == 'red' and sum(completion_ids) % 2)\n"
    )
    rows, odd = config_path.parent / "kept.jsonl", f"rewards=[{config_path.parent}/odd.py:odd]"
    options = ("--pass-rate", 16, "--pass-rate-bounds", 0.01, 0.99, "--pass-rate-file", rows)
    result = command("check", config_path, odd, *options)
    assert result.code == 0 and f"{rows}: 2 rows" in result.out
    assert "pass rates of 4 of 4 rows, 16 answers each: never right 2, sometimes 2, always 0" in result.out
    assert "mm-grpo warm" not in result.out
    again = load_train(GRPOConfig.from_dict({"model": {"path": "m"}, "data": {"train": str(rows)}}))
    first = load_train(GRPOConfig.from_yaml(config_path))
    assert [again.sample(at).columns["answer"] for at in (0, 1)] == ["red", "red"]
    assert again.sample(1).images[0].tobytes() == first.sample(2).images[0].tobytes()
    assert command("check", config_path, odd, *options).code == 2  # the file stays
    (config_path.parent / "low.py").write_text(
        "async def low(completion, answer):\n    return {'red': -1.0, 'green': 0.0}.get(answer)\n"
    )
    never = command("check", config_path, f"rewards=[{config_path.parent}/low.py:low]", "--pass-rate", 3)
    assert never.code == 0 and "no completion of 12 scored" in never.out and "mm-grpo warm" in never.out


def test_a_mixture_and_its_routed_rewards_are_checked(command: Any, config_path: Path) -> None:
    """Each source's rows by their own line, rewards on the rows that they are for, and the shares."""
    folder = config_path.parent
    where = [{"prompt": "where", "image": f"{i}.png", "box": [0, 0, 9, 9 + i]} for i in range(3)]
    (folder / "where.jsonl").write_text("".join(json.dumps(row) + "\n" for row in where))
    config = yaml.safe_load(config_path.read_text())
    boxes = {"path": "where.jsonl", "weight": 3, "task": "where"}
    config["data"]["train"] = [{"path": "rows.jsonl", "task": "name"}, boxes]
    exact = {"name": "exact_match", "when": {"task": "name"}, "strip_thinking": True}
    config["rewards"] = [exact, {"name": "iou", "when": {"task": "where"}}]
    config_path.write_text(yaml.safe_dump(config))
    result = command("check", config_path)
    assert result.code == 0, result.out
    assert "mixture: rows 25.0% (4 rows), where 75.0% (3 rows)" in result.out
    assert row_of(result.out, "train", "exact_match")[3:5] == ["4", "1 / 1 / 1"]
    assert row_of(result.out, "train", "iou")[3:5] == ["3", "1 / 1 / 1"]
    assert "ok, does not apply to 3" in row_of(result.out, "train", "exact_match")[6]
    assert row_of(command("check", config_path, "--rows", "2").out, "train", "iou")[3] == "1"

    wrong = command("check", config_path, "rewards=[{name: iou, when: {task: were}}]")
    assert wrong.code == 2 and "in its rows task is 'name', 'where'" in wrong.err
    (folder / "1.png").write_bytes(b"no image")
    broken = command("check", config_path)
    assert broken.code == 2 and "rows.jsonl:2" in broken.out and "where.jsonl:2" in broken.out


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("algorithm.credit", {"algorithm": {"credit": "pgpo"}, "data": {"train": "text.jsonl", "text_only": True}}),
        ("algorithm.twin_view", {"algorithm": {"twin_view": {"view": "crop"}}}),
        ("model.lora.target_modules", {"model": {"lora": {"target_modules": ["q_prj"]}}}),
        ("model.path: .* attention_dropout", {"model": {"path": "dropout"}}),
        ("algorithm.reference_path", {"algorithm": {"beta": 0.1, "reference_path": "none"}}),
        ("algorithm.reference_path", {"algorithm": {"beta": 0.1, "reference_path": "other"}}),
        ("run.eval_blind", {"run": {"eval_blind": "removed"}, "data": {"eval": "text.jsonl", "text_only": True}}),
        ("run.expected_curve", {"run": {"expected_curve": "none.json"}}),
        ("run.dir", {"run": {"dir": "."}}),
        ("rollout.environment_workers", {"rollout": {"environment": "env.py:E", "environment_workers": 1}}),
        ("rollout.vllm.engine_kwargs.model", {"rollout": {"engine": "vllm", "vllm": {"engine_kwargs": {"model": 1}}}}),
    ],
)  # fmt: skip
def test_check_refuses_everything_that_the_start_of_a_run_refuses(
    words: str, changes: Any, config_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = config_path.parent
    monkeypatch.chdir(folder)
    (folder / "text.jsonl").write_text('{"prompt": "what", "answer": "red"}\n' * 4)
    (folder / "env.py").write_text(
        'class E:\n    def reset(self): return None\n    def press(self) -> str:\n        """Press."""\n'
    )
    (folder / "mine.py").write_text("def mine(completion, environment): return 1.0\n")
    (folder / "other").symlink_to(models["internvl"])
    shutil.copytree(models["qwen2_5_vl"], folder / "dropout")
    sizes = json.loads((folder / "dropout" / "config.json").read_text())
    sizes["text_config"]["attention_dropout"] = 0.1
    (folder / "dropout" / "config.json").write_text(json.dumps(sizes))
    rewards = ["mine.py:mine"] if "environment" in words else ["exact_match"]
    values = merged(yaml.safe_load(config_path.read_text()), {"rewards": rewards, **changes})
    config = GRPOConfig.from_dict(values)
    refused = []
    for starts in (check_config, lambda config: GRPOTrainer(config).train()):
        with pytest.raises(UserError, match=words) as caught:
            starts(config)
        refused.append(str(caught.value))
    assert refused[0] == refused[1]


def test_rewards_that_fail_are_listed_by_row(command: Any, config_path: Path) -> None:
    result = command("check", config_path, f"rewards=[{config_path.parent}/mine.py:mine]")
    assert result.code == 2 and result.out.rstrip().endswith("1 problem(s)")
    (line,) = [line for line in result.out.splitlines() if line.startswith("rows.jsonl:2: ")]
    assert line.endswith("(mine: 'blue' scores 0, '?!' scores 0)")
    assert row_of(result.out, "train", "mine")[6] == "1 row(s) fail"
    result = command("check", config_path, f"rewards=[{config_path.parent}/mine.py:broken]")
    assert result.code == 2 and "1 problem(s)" in result.out and "the first rows.jsonl:1: " in result.out
    assert "judge is down" in result.out and "mine.py:6" in result.out and "rows.jsonl:1: " in result.out
    entry = f"rewards=[{config_path.parent}/mine.py:ask]"
    quiet = command("check", config_path, entry)
    called = command("check", config_path, entry, "--call-judges")
    assert quiet.code == 0 and "not called" in row_of(quiet.out, "train", "ask")[6]
    assert called.code == 0 and row_of(called.out, "train", "ask")[3:6] == ["4", "1 / 1 / 1", "0 / 0 / 0"]


def test_lost_images_are_one_cause(command: Any, config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config_path.parent)
    photos = config_path.parent / "photos"
    photos.mkdir()
    for picture in config_path.parent.glob("*.png"):
        picture.rename(photos / picture.name)
    lost = command("check", config_path)
    assert lost.code == 2 and lost.out.rstrip().endswith("1 problem(s)")
    assert "4 of 4 rows" in lost.out and "data.image_dir=photos" in lost.out, lost.out
    assert command("check", config_path, "data.image_dir=photos").code == 0
    (photos / "2.png").write_bytes((photos / "2.png").read_bytes()[:200])  # shows in decoding alone
    drop = command("check", config_path, "data.image_dir=photos", "data.on_bad_media=drop")
    assert "(data.on_bad_media = drop): 1 of 4" in drop.out


def test_a_bad_first_picture_of_an_environments_rows_is_listed(command: Any, config_path: Path) -> None:
    (config_path.parent / "0.png").write_text("no picture")
    (config_path.parent / "env.py").write_text(
        "class Ask:\n    def reset(self, answer):\n        return answer\n"
        '    def look(self) -> str:\n        """Look."""\n        return \'x\'\n'
    )
    env = ("rewards=[exact_match]", f"rollout.environment={config_path.parent}/env.py:Ask")
    result = command("check", config_path, *env)
    assert result.code == 2 and "rows.jsonl:1: image" in result.out and "1 problem(s)" in result.out
    assert "answer -> exact_match and reset" in result.out  # the second row is shown


def test_an_environment_shows_the_first_picture(command: Any, config_path: Path) -> None:
    """Rows without images need no data.text_only then."""
    (config_path.parent / "env.py").write_text(
        "from PIL import Image\nclass Show:\n"
        "    def reset(self, answer):\n        return Image.new('RGB', (60, 60), answer)\n"
        '    def press(self) -> str:\n        """Press."""\n        return \'x\'\n'
    )
    rows = config_path.parent / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "what", "answer": a}) + "\n" for a in ("red", "blue")))
    env = ("rewards=[exact_match]", f"rollout.environment={config_path.parent}/env.py:Show")
    shown = command("check", config_path, *env)
    assert shown.code == 0 and row_of(shown.out, "train", "303 / ")[3] == "2", shown.out + shown.err
    assert command("check", config_path, "rewards=[exact_match]").code == 2


def test_check_writes_its_page_but_never_over_a_file_of_the_user(
    command: Any, config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("check", config_path, "--page", "check.html")
    assert result.code == 0 and f"page: {tmp_path}/check.html shows 4 rows" in result.out
    assert (tmp_path / "check.html").read_text().count('"prompt":[') == 4
    named = command("check", config_path, "--page", "seen.html", "data.max_prompt_length=1")
    assert named.code == 2 and f"page: {tmp_path}/seen.html shows 0 rows" in named.out  # written all the same
    assert '"refused_count":4' in (tmp_path / "seen.html").read_text()
    (tmp_path / "mine.html").write_text("mine")
    refused = command("check", config_path, "--page", "mine.html")
    assert refused.code == 2 and "--page 'mine.html'" in refused.err
    assert (tmp_path / "mine.html").read_text() == "mine" and "rewards:" not in refused.out


@pytest.mark.field_bug("cut-prompt")
def test_prompts_that_the_learner_or_the_engine_would_stop_at(command: Any, config_path: Path) -> None:
    rows = config_path.parent / "rows.jsonl"
    two = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "what is it"}]
    row = {"prompt": [{"role": "user", "content": two}], "images": ["0.png", "1.png"], "answer": "red"}
    rows.write_text(rows.read_text() + json.dumps(row) + "\n")
    pack = command("check", config_path, "optim.max_tokens_per_pack=60", "rollout.max_completion_length=20")
    assert pack.code == 2 and f"{rows}:5: the prompt has " in pack.out
    assert "more than optim.max_tokens_per_pack = 60" in pack.out
    drop = ("optim.max_tokens_per_pack=60", "rollout.max_completion_length=20", "data.on_overlong=drop")
    few = command("check", config_path, *drop, f"data.eval={rows}")
    assert few.code == 0 and few.out.count("left out") == 1  # an evaluation learns from none
    assert "train: left out (data.on_overlong = drop): 1 of 5" in few.out
    images = command("check", config_path, "rollout.engine=vllm", "rollout.vllm.max_images=1")
    assert images.code == 2 and images.out.rstrip().endswith("1 problem(s)")
    assert f"{rows}:5: the row has 2 images, and rollout.vllm.max_images = 1;" in images.out
    videos = [{"video": ["0.png", "1.png"], "fps": 1}] * 2
    shown = {"prompt": "which", "videos": videos, "answer": "red"}
    rows.write_text(rows.read_text().replace(json.dumps(row), json.dumps(shown)))
    clips = command("check", config_path, "rollout.engine=vllm", "rollout.vllm.max_videos=1")
    assert (
        clips.code == 2 and f"{rows}:5: the row has 2 videos, and rollout.vllm.max_videos = 1;" in clips.out
    )
    length = command("check", config_path, "rollout.engine=vllm", "rollout.vllm.max_model_len=40")
    assert length.code == 2
    assert "rollout.vllm.max_model_len = 40 less rollout.max_completion_length allows 35;" in length.out
    assert command("check", config_path, "rollout.engine=vllm").code == 0


def test_a_reward_that_applies_to_no_row_is_a_problem(command: Any, config_path: Path) -> None:
    rows = config_path.parent / "rows.jsonl"
    null = [json.dumps({"prompt": "what is it", "image": f"{i}.png", "answer": None}) for i in range(4)]
    rows.write_text("\n".join(null) + "\n")
    result = command("check", config_path)
    assert result.code == 2 and result.out.rstrip().endswith("1 problem(s)")
    assert "reward 'exact_match' applies to no row of train: in all 4 a column" in result.out
    assert row_of(result.out, "train", "exact_match")[6] == "applies to no row"
    watched = command("check", config_path, "rewards=[format,{name: exact_match, weight: 0}]")
    assert watched.code == 0, watched.out
    assert command("check", config_path, "--rows", "2").code == 0  # two rows do not show what the others hold


def test_warnings_are_printed_once_and_counted(command: Any, config_path: Path, caplog: Any) -> None:
    """Those of the golds and those that reading the rows logs; `--strict` refuses them, and a run logs them."""
    mask = "data:image/png;base64," + base64.b64encode((config_path.parent / "0.png").read_bytes()).decode()
    lines = [
        {"prompt": "what", "image": f"{at}.png", "answer": answer, "mask": mask}
        for at, answer in enumerate(["red", "[{'role': 'user', 'content': 'red'}]", "blue", "#### 7"])
    ]
    (config_path.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = command("check", config_path, "rollout.max_completion_length=60")
    assert result.code == 0 and result.out.rstrip().endswith("ok, 3 warning(s)")
    for name in ("rows.jsonl:2: ", "rows.jsonl:4: ", "the column 'mask'"):
        assert (result.out + result.err + caplog.text).count(name) == 1, name
    assert "rows.jsonl:2: " in result.out
    strict = command("check", config_path, "--strict", "rollout.max_completion_length=60")
    assert strict.code == 2 and strict.out.rstrip().endswith("3 problem(s), 3 warning(s)")
    short = command("check", config_path, "rollout.max_completion_length=2")  # the messages do not fit
    assert short.out.rstrip().endswith("ok, 4 warning(s)")
    assert command("check", config_path, "--strict", "rewards=[format]", "data.text_only=true").code == 0
    caplog.clear()
    command("train", config_path, "run.max_steps=1")
    assert sum("rows.jsonl:2: " in text and "'exact_match'" in text for text in caplog.messages) == 1
