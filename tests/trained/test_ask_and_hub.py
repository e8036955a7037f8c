"""One question to a run, an export and a model folder; exports sent to a Hub that is not there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
import torch
from helpers import tiny
from helpers.clips import number_of, write_clip
from helpers.finished_runs import Finished
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from mm_grpo.errors import ConfigError
from mm_grpo.rollout.engine import Request
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.trained import hub, proof
from mm_grpo.trained.ask import ask, load_answering
from mm_grpo.trained.export import MARK, export_run
from mm_grpo.trained.source import model_to_evaluate
from mm_grpo.types import Completion, Video

Runs = Callable[[str], Finished]


@pytest.fixture(scope="module")
def exported(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    export_run(runs("lora").root, folder / "merged")
    export_run(runs("lora").root, folder / "adapter", adapter=True)
    return folder


@pytest.mark.slow
def test_a_run_its_exports_and_its_model_answer_alike(runs: Runs, exported: Path) -> None:
    run = runs("lora")
    pictures = [str(exported / f"{i}.png") for i in range(2)]
    for i, file in enumerate(pictures):
        tiny.picture(i, 112, 84).save(file)
    base = str(run.trainer.config.model.path)
    sources = [str(run.root), str(exported / "merged"), str(exported / "adapter"), base]
    answers = {}
    for source in sources:
        loaded = load_answering(source)
        assert (loaded.config.data.system_prompt == "look well") == (source != base)
        ways = (pictures, 0.0), (pictures[:1], 1.0)
        options: Any = {"max_tokens": 12, "seed": 3}
        found = [ask(loaded, "what is it", i, temperature=t, **options).token_ids for i, t in ways]
        answers[source] = found
        with pytest.raises(ConfigError, match=r"--max-tokens 4000: .* context is 2048"):
            ask(loaded, "say", [], max_tokens=4000)
        if source != base:
            assert ask(loaded, "what is it", []).token_ids  # the run's own sampling, greedy
            assert loaded.sampling.max_tokens == 6 and loaded.sampling.temperature == 0.0
    first = answers[sources[0]]
    assert answers[sources[1]] == answers[sources[2]] == first
    assert answers[base] != first and len(set(first)) == 2


@pytest.mark.parametrize("maker", ["export", "peft"])
@pytest.mark.field_bug("lora-keys")
def test_an_adapter_folder_without_all_of_its_layers_is_refused(
    maker: str, runs: Runs, exported: Path, command: Any, tmp_path: Path
) -> None:
    folder, base = tmp_path / "adapter", str(runs("lora").trainer.config.model.path)
    if maker == "export":
        shutil.copytree(exported / "adapter", folder)
    else:
        options = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["merger"])
        get_peft_model(AutoModelForImageTextToText.from_pretrained(base), options).save_pretrained(folder)
    load_answering(str(folder))
    file = folder / "adapter_model.safetensors"
    whole = load_file(file)
    lost = sorted(name for name in whole if ".lora_" in name)[-2:]
    kept = {name: tensor for name, tensor in whole.items() if name not in lost}
    layer = "base_model.model.model.language_model.layers.9.self_attn.q_proj"
    other = {f"{layer}.lora_A.weight": torch.ones(4, 64)}
    for tensors, named in ((kept, lost), ({**whole, **other}, list(other))):
        save_file(tensors, file)
        code, out, err = command("ask", folder, "what")
        message = err.splitlines()[-1]  # behind the bar of transformers
        assert code == 2 and not out and message.startswith("error: ") and str(folder) in message
        assert all(name in message for name in named), message


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern"])
def test_an_adapter_whose_pattern_takes_for_ever_is_refused(
    field: str, exported: Path, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "PATTERN_TIMEOUT", 1.0)
    folder, slow = tmp_path / "adapter", r"(([a-z_0-9]|\.)+)+!"
    shutil.copytree(exported / "adapter", folder)
    file = folder / "adapter_config.json"
    value = {slow: 4} if field == "rank_pattern" else slow
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    code, _, err = command("ask", folder, "what")
    assert code == 2 and str(file) in err.splitlines()[-1]


def test_an_empty_answer_is_said(exported: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Completion((1,), (0.0,), "", "stop", 0)
    monkeypatch.setattr("mm_grpo.trained.ask.ask", lambda *_, **__: empty)
    code, out, err = command("ask", exported / "merged", "hi")
    assert (code, out) == (0, "\n") and "empty" in err.splitlines()[-1]


def test_code_that_a_folder_asks_for_is_run_by_the_user_s_word_alone(
    runs: Runs, exported: Path, command: Any, tmp_path: Path
) -> None:
    code, ran = tmp_path / "theirs.py", tmp_path / "ran"
    code.write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from mm_grpo.processors.qwen_vl import QwenVLProcessor\nclass Theirs(QwenVLProcessor):\n    pass\n"
    )
    run = runs("lora")
    for each in (run.root, exported / "merged", exported / "adapter"):
        shutil.copytree(each, tmp_path / each.name)
    run_copy = tmp_path / run.root.name
    mine = run.trainer.config
    mine.with_values({"rewards": ["exact_match"]}).save(tmp_path / "mine.yaml")
    out = tmp_path / "out"
    for asked in ({"processor": f"{code}:Theirs"}, {"trust_remote_code": True}):
        theirs = mine.with_values({f"model.{name}": value for name, value in asked.items()})
        theirs.save(run_copy / "config.yaml")
        for folder in (tmp_path / "merged", tmp_path / "adapter"):
            mark = json.loads((folder / MARK).read_text())
            mark["settings"]["model"] = asked
            (folder / MARK).write_text(json.dumps(mark))
        folders = run_copy, tmp_path / "merged", tmp_path / "adapter"
        for folder, *arguments in (
            *((folder, "ask", folder, "what") for folder in folders),
            (run_copy, "export", run_copy, out),
            (run_copy, "eval", tmp_path / "mine.yaml", "--model", run_copy),
        ):
            status, _, err = command(*arguments)
            named = str(folder) in err and f"model.{next(iter(asked))}" in err
            assert status == 2 and named, (arguments, err)
            assert "--trust-remote-code" in err and not ran.exists() and not out.exists(), arguments
        with pytest.raises(ConfigError, match="--trust-remote-code"):  # the user trusts another model's code
            model_to_evaluate(theirs.with_values({"model.path": str(tmp_path)}), str(run_copy))
    saved = model_to_evaluate(mine, str(run_copy / "model"), trust=True).config
    assert saved is not None and saved.model.trust_remote_code
    mark["settings"]["model"] = {"processor": f"{code}:Theirs"}
    (tmp_path / "merged" / MARK).write_text(json.dumps(mark))
    status, _, err = command("ask", tmp_path / "merged", "what", "--trust-remote-code")
    assert status == 0 and ran.exists(), err


def test_videos_of_a_question_stand_behind_its_images(
    models: dict[str, Path], command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight frames of two seconds, of which `data.video_fps` of 2 shows four; as a command, and with a wrong file."""
    clip = write_clip(tmp_path / "clip.mp4", [number / 4 for number in range(8)], rate=4, scale=2)
    sent: list[Request] = []
    tiny.picture(1).save(tmp_path / "a.png")
    generate = TransformersEngine.generate

    def watched(engine: TransformersEngine, requests: Sequence[Request]) -> list[Completion]:
        sent.extend(requests)
        return generate(engine, requests)

    monkeypatch.setattr(TransformersEngine, "generate", watched)
    asked = ("ask", models["qwen2_5_vl"], "what is it", "--image", tmp_path / "a.png", "--max-tokens", 5)
    code, answer, err = command(*asked, "--video", clip, "--temperature", 0.5)
    assert ((code, err) == (0, "") or "cut after" in err) and answer.strip()
    ((sampling, prompt),) = ((request.sampling, request.prompt) for request in sent)
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 5)
    image, video = prompt.engine_prompt.media
    assert isinstance(video, Video) and not isinstance(image, Video)
    assert video.fps == 2.0 and len(video.times) == 4 and video.times[0] == 0.0
    assert [*map(number_of, video.frames)] == [round(4 * time) for time in video.times]
    (tmp_path / "a.txt").write_text("no video")
    for option, name in (("--image", "no.png"), ("--video", "no.mp4"), ("--video", "a.txt")):
        wrong = command(*asked, option, tmp_path / name)
        assert wrong.code == 2 and option in wrong.err and f"{tmp_path}/{name}" in wrong.err
        assert "image_dir" not in wrong.err and ("there is no such file" in wrong.err) == (name != "a.txt")
    refused = command("ask", models["gemma3"], "what is it", "--video", clip)
    assert refused.code == 2 and "the question" in refused.err and "'gemma3' get images alone" in refused.err


class FakeHub:
    """Of HfApi what is used; `repositories` maps a name to its files."""

    repositories: ClassVar[dict[str, Any]] = {}
    private: ClassVar[dict[str, bool]] = {}

    def whoami(self) -> dict[str, str]:
        return {"name": "me"}

    def repo_exists(self, name: str) -> bool:
        return name in self.repositories

    def file_exists(self, name: str, file: str) -> bool:
        return file in self.repositories[name]

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        assert exist_ok or name not in self.repositories
        self.repositories.setdefault(name, [])
        self.private.setdefault(name, private)

    def upload_folder(self, *, repo_id: str, folder_path: str, **options: Any) -> str:
        self.repositories[repo_id] = sorted(p.name for p in Path(folder_path).iterdir())
        return f"commit of {repo_id}"


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> type[FakeHub]:
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(FakeHub, "repositories", {})
    monkeypatch.setattr(FakeHub, "private", {})
    return FakeHub


def test_an_export_is_pushed_private_and_never_over_a_foreign_repository(
    exported: Path, online: type[FakeHub]
) -> None:
    assert hub.check_hub("mine") == "me/mine"
    assert hub.push(exported / "merged", "me/mine") == "commit of me/mine"
    assert online.private == {"me/mine": True} and MARK in online.repositories["me/mine"]
    with pytest.raises(ConfigError, match=r"'me/mine' holds an export"):
        hub.check_hub("mine")
    assert hub.check_hub("mine", overwrite=True) == "me/mine"
    online.repositories["other/model"] = ["config.json"]
    with pytest.raises(ConfigError, match=r"'other/model' is there already"):
        hub.check_hub("other/model", overwrite=True)
    with pytest.raises(ConfigError, match=r"--push a//b: the Hub cannot be used"):
        hub.check_hub("a//b")


def test_a_trainer_pushes_what_it_holds(runs: Runs, online: type[FakeHub]) -> None:
    trainer = runs("lora").trainer
    assert trainer.push_to_hub("them/all", private=False, adapter=True) == "commit of them/all"
    assert online.private == {"them/all": False}
    assert "adapter_model.safetensors" in online.repositories["them/all"]
    with pytest.raises(ConfigError, match="adapter=True: the run trained no adapters"):
        runs("full").trainer.push_to_hub("x", adapter=True)


def test_an_unusable_hub_is_one_message(
    runs: Runs,
    command: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = runs("full").root
    capsys.readouterr()  # of its training, where no test had asked for it before
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, out, err = command("export", run, tmp_path / "out", "--push", "me/x")
    assert code == 2 and "HF_HUB_OFFLINE is set" in err and not out
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    code, _, err = command("export", run, tmp_path / "out", "--push", "me/x")
    assert code == 2 and "there is no token of the Hub" in err

    class Down(FakeHub):
        def repo_exists(self, name: str) -> bool:
            raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    monkeypatch.setattr(huggingface_hub, "HfApi", Down)
    code, _, err = command("export", run, tmp_path / "out", "--push", "me/x")
    assert code == 2 and "the Hub cannot be used (OSError: no route to host)" in err
    assert list(tmp_path.iterdir()) == []
