"""Rows whose images cannot be read are found, or left out, before a model is loaded."""

from __future__ import annotations

import base64
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reading
from PIL import Image
from reading import config

from mm_grpo.data import image_files
from mm_grpo.data.base import Rows
from mm_grpo.data.image_files import readable
from mm_grpo.data.mixture import Mixture
from mm_grpo.data.sources import load_train
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import BadMedia, DataError
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
    with pytest.raises(DataError, match=r"^train row 7: image .*data\.on_bad_media"):
        readable(found, "stop", Ranks())
    left = readable(found, "drop", Ranks())
    assert numbers(left) == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]
    assert (left.sample(7).uid, left.row_name(7)) == ("train:8", "train row 8")
    shuffled = left.control("shuffled")
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
    monkeypatch.setattr(
        image_files, "_faults", lambda rows, ids, *rest: looked.append([*ids]) or faults(rows, ids, *rest)
    )
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
    made = config(on_bad_media="drop").with_values({"model.path": str(models["qwen2_5_vl"])})
    builder = PromptBuilder(load_processor(made.model.path), made, None)
    step = builder.prompts(dataset(given), {0: 0, 1: 1, 2: 2})
    assert (step.slots, step.dropped) == ([0, 2], 1)
    builder.close()
    stopping = made.with_values({"data.on_bad_media": "stop"})
    strict = PromptBuilder(load_processor(made.model.path), stopping, None)
    with pytest.raises(DataError, match=r"train row 1: "):
        strict.prompts(dataset(given), {0: 0, 1: 1})
    strict.close()


def encoded(size: tuple[int, int], kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    return reading.encoded(Image.effect_noise(size, 50).convert(mode), kind, **options)


def with_segments(data: bytes, marker: int, count: int) -> bytes:
    """A JPEG with `count` segments of 60 kB behind its first marker, as photos have them for EXIF and profiles."""
    segment = bytes([0xFF, marker]) + (60_002).to_bytes(2, "big") + bytes(60_000)
    return data[:2] + segment * count + data[2:]


def tables_first(data: bytes) -> bytes:
    at = data.index(b"\xff\xc4")
    end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
    return data[:2] + data[at:end] + data[2:]


TURNED = Image.Exif()
TURNED[0x0112] = 6
STRIP = (2000, 9)
SIZES: dict[str, tuple[Any, bool]] = {
    "a PNG": (encoded(STRIP, "PNG"), True),
    "a JPEG": (encoded(STRIP), True),
    "a tall JPEG": (encoded((9, 2000)), True),
    "a turned JPEG": (encoded(STRIP, exif=TURNED), True),
    "a progressive JPEG": (encoded(STRIP, progressive=True), True),
    "EXIF before the size": (with_segments(encoded(STRIP), 0xE1, 1), True),
    "a large profile before the size": (with_segments(encoded(STRIP), 0xE2, 6), True),
    "a PIL image": (Image.new("RGB", STRIP), True),
    "a data URL": ("data:image/png;base64," + base64.b64encode(encoded(STRIP, "PNG")).decode(), True),
    "no size in a JPEG": (encoded((64, 48))[:40], True),
    "ratio 199": (encoded((1990, 10)), False),
    "ratio 200, turned": (encoded((10, 2000), exif=TURNED), False),
    "a phone's JPEG": (with_segments(encoded((640, 480), exif=TURNED), 0xE1, 1), False),
    "tables before the size": (tables_first(encoded((64, 48))), False),
    "in four inks": (encoded((64, 48), mode="CMYK"), False),
    "progressive and grey": (encoded((64, 48), mode="L", progressive=True), False),
    "filled up": (encoded((64, 48))[:2] + b"\xff\xff" + encoded((64, 48))[2:], False),
    "a WebP": (encoded((64, 48), "WEBP"), False),
    "an unread PIL image": (Image.new("CMYK", (300, 2)), False),
}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("on_disk", [False, True])
def test_sizes_that_the_model_refuses_are_bad_images(
    kind: str, on_disk: bool, tmp_path: Path, models: dict[str, Path]
) -> None:
    """As soon as headers are looked at, and with the outcome of the row itself."""
    image, bad = SIZES[kind]
    if on_disk and isinstance(image, bytes):
        (tmp_path / "p").write_bytes(image)
        image = str(tmp_path / "p")
    sound = {"prompt": "?", "image": Image.new("RGB", (64, 64))}
    given = dataset([{"prompt": "?", "image": image}, *(sound,) * 9])
    processor = load_processor(str(models["qwen2_5_vl"]))
    assert len(readable(given, "drop", Ranks(), processor)) == 10 - bad
    with pytest.raises(BadMedia, match=r"train row 0|train:0") if bad else nullcontext():
        processor.prompt(given.sample(0))
    with pytest.raises(DataError, match="train row 0") if bad else nullcontext():
        readable(given, "stop", Ranks(), processor)
    policy = "stop" if not bad or "size in" not in kind else "drop"
    assert len(readable(given, policy, Ranks())) >= 9  # no rule


def test_a_rule_may_depend_on_how_an_image_lies(tmp_path: Path) -> None:
    """Then the image as EXIF turns it counts: 60 by 40 pixels here."""
    sizes = []

    def refusal(size: tuple[int, int], limits: tuple[tuple[str, int], ...]) -> str:
        sizes.append((size, limits))
        return "is flat" if size[0] < size[1] else ""

    (tmp_path / "tall.jpg").write_bytes(encoded((60, 40), exif=TURNED))
    (tmp_path / "flat.jpg").write_bytes(encoded((60, 40)))
    parts = [{"type": "image", "max_pixels": 5000}, {"type": "text", "text": "?"}]
    files = [str(tmp_path / f"{n}.jpg") for n in ("tall", "flat")]
    rows = [{"prompt": [{"role": "user", "content": parts}], "image": file} for file in files]
    processor = SimpleNamespace(refusal=refusal)
    with pytest.raises(DataError, match=r"^train row 1: .*flat.jpg' is flat"):
        readable(dataset(rows), "stop", Ranks(), processor)
    assert ((60, 40), (("max_pixels", 5000),)) in sizes


def test_a_resumed_run_leaves_out_the_rows_that_it_left_out_at_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever their images are now; a row that is bad since keeps its index, and its slots are empty."""
    given = dataset(rows(tmp_path, 30, bad={7: None}))
    resumed = readable(given, "drop", Ranks(), before={"train": [3]})
    assert numbers(resumed) == [n for n in range(30) if n != 3]
    assert "train: 1 rows stay left out" in caplog.text and "1 rows leave their places" in caplog.text
    assert numbers(readable(given, "drop", Ranks(), before={})) == [*range(30)]
    with pytest.raises(DataError, match=r"^train row 7"):
        readable(given, "stop", Ranks(), before={"train": [3]})
    with pytest.raises(DataError, match="a tenth"):
        readable(given, "drop", Ranks(), before={"train": [1, 2, 3]})
