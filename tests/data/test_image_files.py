"""Rows whose images cannot be read are found, or left out, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from reading import config

from mm_grpo.data import image_files
from mm_grpo.data.base import Rows
from mm_grpo.data.image_files import readable
from mm_grpo.data.mixture import Mixture
from mm_grpo.data.sources import load_train
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import DataError
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.prompts import PromptBuilder

FORMATS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP", "tif": "TIFF", "gif": "GIF", "bmp": "BMP"}


def rows(folder: Path, count: int = 12, bad: Any = ()) -> list[dict[str, Any]]:
    """Rows with a picture each, of all formats; `bad` maps a row to the bytes of its file, None for no file."""
    made = []
    for i, (suffix, name) in zip(range(count), list(FORMATS.items()) * count, strict=False):
        path = folder / f"{i}.{suffix}"
        Image.effect_noise((90, 80), 50).convert("RGB").save(path, name)
        if i in bad:
            path.unlink() if bad[i] is None else path.write_bytes(bad[i])
        made.append({"prompt": "?", "image": str(path), "n": i})
    return made


def dataset(given: Any) -> Rows:
    return load_train(config(), given)


def numbers(found: Rows) -> list[int]:
    return [found.fields(i).columns["n"] for i in range(len(found))]


@pytest.mark.parametrize("data", [None, b"", b"<html>no</html>"])
def test_a_file_that_is_no_picture_ends_the_run_or_is_left_out(tmp_path: Path, data: bytes | None) -> None:
    found = dataset(rows(tmp_path, bad={7: data}))
    with pytest.raises(DataError, match=r"^train row 7: image .*data\.on_bad_image"):
        readable(found, "stop", Ranks())
    left = readable(found, "drop", Ranks())
    assert numbers(left) == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]
    assert (left.sample(7).uid, left.row_name(7)) == ("train:8", "train row 8")
    shuffled = left.with_shuffled_images()
    sizes = [shuffled.sample(i).uid for i in range(11)]  # opens every image: none is that of the row left out
    assert sizes == [f"train:{n}" for n in numbers(left)] and len(left.head(3)) == 3
    before = left.fingerprint()
    assert before != dataset(rows(tmp_path)[:11]).fingerprint()  # writes the files again


def test_at_most_a_tenth_of_a_source_is_left_out(tmp_path: Path) -> None:
    good, bad = rows(tmp_path, 10), rows(tmp_path, 10, bad={3: None, 4: None})
    with pytest.raises(DataError, match=r"2 of 10 rows.*a tenth"):
        readable(dataset(bad), "drop", Ranks())
    one = rows(tmp_path, 10, bad={3: None})
    both = readable(dataset(Mixture([{"path": good}, {"path": one}])), "drop", Ranks())
    assert [len(part) for part in both.sources] == [9, 9] and len(both) == 18


def test_processes_share_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dataset(rows(tmp_path, 20, bad={3: None, 8: b"no"}))
    looked: list[list[int]] = []
    faults = image_files._faults
    monkeypatch.setattr(image_files, "_faults", lambda rows, ids: looked.append([*ids]) or faults(rows, ids))
    of_ranks = [[(8, "b")], [(3, "a")]]

    class Two(Ranks):
        def all_gather(self, value: Any, what: str) -> list[Any]:
            assert [index for index, _ in value] == [index for index, _ in of_ranks[self.rank]]
            return of_ranks

    left = [numbers(readable(found, "drop", Two(rank, 2))) for rank in (0, 1)]
    assert left[0] == left[1] == [n for n in range(20) if n not in (3, 8)]
    assert looked == [list(range(0, 20, 2)), list(range(1, 20, 2))]


def test_a_truncated_picture_is_left_out_later(tmp_path: Path, models: dict[str, Path]) -> None:
    given = rows(tmp_path, 4)
    path = Path(given[1]["image"])
    path.write_bytes(path.read_bytes()[:900])
    made = config(on_bad_image="drop").with_values({"model.path": str(models["qwen2_5_vl"])})
    builder = PromptBuilder(load_processor(made.model.path), made, None)
    step = builder.prompts(dataset(given), {0: 0, 1: 1, 2: 2})
    assert (step.slots, step.dropped) == ([0, 2], 1)
    builder.close()
    stopping = made.with_values({"data.on_bad_image": "stop"})
    strict = PromptBuilder(load_processor(made.model.path), stopping, None)
    with pytest.raises(DataError, match=r"train row 1: "):
        strict.prompts(dataset(given), {0: 0, 1: 1})
    strict.close()
