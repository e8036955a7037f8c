"""Prompts made ahead in threads: the same prompts, one decode of each image, faults in their place."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.configs import small_config
from helpers.run_folders import metrics_of
from helpers.small_runs import HELDOUT, config_for, vowels
from helpers.tiny import picture
from PIL import Image

from mm_grpo import GRPOTrainer
from mm_grpo.data import images
from mm_grpo.data.dataset import Dataset
from mm_grpo.errors import DataError
from mm_grpo.files import encoded_image
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.rollout.prefetch import Prefetcher
from mm_grpo.rollout.prompts import PromptBuilder
from mm_grpo.types import Prompt, Sample


@pytest.fixture(scope="module")
def processor(models: dict[str, Path]) -> Processor:
    return load_processor(str(models["qwen2_5_vl"]))


@pytest.fixture
def prefetcher(processor: Processor) -> Iterator[Prefetcher]:
    made = Prefetcher(processor, workers=3)
    yield made
    made.close()


def rows(count: int, size: int = 84) -> list[dict[str, Any]]:
    pictures = [encoded_image(picture(i, size, size)) for i in range(count)]
    return [{"prompt": f"number {i}", "image": p, "answer": str(i)} for i, p in enumerate(pictures)]


def dataset(given: Any, **data: Any) -> Dataset:
    return Dataset(given, small_config("model", data=data).data)


def same(one: Prompt, other: Prompt) -> bool:
    assert one.uid == other.uid and one.token_ids == other.token_ids
    assert one.engine_prompt.token_ids == other.engine_prompt.token_ids
    pictures = zip(one.engine_prompt.images, other.engine_prompt.images, strict=True)
    assert all(a.tobytes() == b.tobytes() for a, b in pictures)
    assert torch.equal(one.position_ids, other.position_ids)
    return all(torch.equal(one.vision[key], other.vision[key]) for key in one.vision.keys() | other.vision)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_thread_that_makes_prompts_computes_alone_and_no_other_does(processor: Processor) -> None:
    """OpenMP counts the helpers of every thread; more than cores, and all of them sleep between two operations."""
    found: list[int] = []

    def noted(sample: Sample) -> Sample:
        found.append(torch.get_num_threads())
        return sample

    prefetcher = Prefetcher(processor, 2, SimpleNamespace(prepare=noted, same_thread=False))
    data = dataset(rows(4))
    waits = [prefetcher.begin(data, row) for row in range(4)]
    for wait in waits:
        wait()
    prefetcher.close()
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join(60)
    assert found == [1, 1, 1, 1, 2] and torch.get_num_threads() == 2


@pytest.mark.parametrize("workers", [0, 5])
def test_prompts_made_ahead_are_those_of_the_plain_way(processor: Processor, workers: int) -> None:
    """Rows of another set with the same names are made ahead too."""
    data = dataset(rows(8))
    prefetcher = Prefetcher(processor, workers)
    prefetcher.ahead(data.control("shuffled"), [1, 0])
    prefetcher.ahead(data, [5, 1, 2, 7])
    waits = [prefetcher.begin(data, row) for row in (1, 0, 7, 3)]
    for row, wait in zip((1, 0, 7, 3), waits, strict=True):
        made = wait()
        assert made.decoded == {"images": 1} and same(made.prompt, processor.prompt(data.sample(row)))
    prefetcher.close()


def test_what_is_wrong_with_a_row_is_raised_when_it_is_asked_for(prefetcher: Prefetcher) -> None:
    given = rows(4)
    given[2]["image"] = given[2]["image"][:60]

    class Unreadable(list):  # type: ignore[type-arg]
        def __getitem__(self, index: Any) -> Any:
            if index == 3:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    data = Dataset(Unreadable(given), small_config("model").data, verify=False)
    prefetcher.ahead(data, range(4))
    assert prefetcher.begin(data, 0)().prompt.uid == "train:0"
    with pytest.raises(DataError, match=r"train row 2: image .* is damaged or truncated"):
        prefetcher.begin(data, 2)()
    wait = prefetcher.begin(data, 3)
    with pytest.raises(OSError, match="the disk is gone"):
        wait()


def test_rows_that_share_a_picture_of_the_users_may_be_opened_side_by_side(processor: Processor) -> None:
    plain = picture(3, 600, 600)
    for _ in range(3):
        shared = Image.open(io.BytesIO(encoded_image(plain)))  # its pixels are not read yet
        data = dataset([{"prompt": f"{i}", "image": shared} for i in range(8)])
        prefetcher = Prefetcher(processor, workers=8)
        for wait in [prefetcher.begin(data, row) for row in range(8)]:
            assert wait().prompt.sample.images[0].tobytes() == plain.tobytes()
        prefetcher.close()


def test_a_dataset_that_belongs_to_a_thread_is_read_in_it(prefetcher: Prefetcher) -> None:
    given, owner = rows(4), threading.get_ident()

    class Bound:
        column_names = ("prompt", "image", "answer")

        def __len__(self) -> int:
            return len(given)

        def __getitem__(self, index: int, /) -> Any:
            assert threading.get_ident() == owner
            return given[index]

    data = dataset(Bound())
    prefetcher.ahead(data, range(2))
    made = [prefetcher.begin(data, row)() for row in range(4)]
    assert [m.prompt.sample.columns["answer"] for m in made] == ["0", "1", "2", "3"]


def test_the_processor_is_used_by_one_thread_at_a_time(processor: Processor) -> None:
    inside: list[int] = []

    class Watched:
        def prompt(self, sample: Any) -> Prompt:
            inside.append(1)
            time.sleep(0.01)
            assert len(inside) == 1
            inside.pop()
            return processor.prompt(sample)

    prefetcher = Prefetcher(Watched(), workers=4)  # type: ignore[arg-type]
    data = dataset(rows(6))
    assert len([wait() for wait in [prefetcher.begin(data, row) for row in range(6)]]) == 6
    prefetcher.close()


def test_a_row_with_two_slots_of_a_step_has_one_prompt(processor: Processor) -> None:
    builder = PromptBuilder(processor, small_config("model"), None)
    found = builder.prompts(dataset(rows(2)), {0: 1, 1: 0, 2: 1})
    assert found.slots == [0, 1, 2] and found.decoded == {"images": 2}
    assert found.prompts[0] is found.prompts[2] and found.prompts[0].uid == "train:1"
    builder.close()


def run(path: Path, folder: Path, given: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    config = config_for(path, folder, **changes)
    GRPOTrainer(config, train=given, eval=HELDOUT, rewards=[vowels]).train()
    return metrics_of(folder)


@pytest.mark.slow
def test_a_run_decodes_each_image_once_and_is_the_same_without_threads(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    decode = images._decode

    def counted(image: Any, where: Any) -> Any:
        decoded.append(threading.current_thread().name)
        return decode(image, where)

    monkeypatch.setattr(images, "_decode", counted)
    given = rows(6)
    found, names = [], []
    for workers in (0, 2):
        decoded.clear()
        monkeypatch.setattr("mm_grpo.rollout.prompts.WORKERS", workers)
        found.append(run(models["qwen2_5_vl"], tmp_path / str(workers), given))
        names.append(set(decoded))
        # 3 steps of 4 prompts, two evaluations of 3 rows, and the check at the start, which makes one prompt
        assert len(decoded) == 3 * 4 + 2 * 3 + 1
    assert found[0] == found[1]
    assert names[0] == {"MainThread"} and all(name.startswith("mm_grpo prompts") for name in names[1])
    counts = ("prompts/images", "prompts/images_decoded", "prompts/frames_decoded")
    assert [tuple(r[name] for name in counts) for r in found[1][1:]] == [(4, 4, 0)] * 3
