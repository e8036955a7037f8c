"""Rows with videos: columns, parts and tags, what is shown of each, published sets, and every refusal."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from reading import IMAGE, VIDEO, config, fields_of, fields_refusal, png, rows_refusal, text, user, write_rows

from mm_grpo.data.blind import media_key
from mm_grpo.data.dataset import Dataset
from mm_grpo.data.rows import Fields
from mm_grpo.data.sources import load_train, shared_rows
from mm_grpo.data.videos import VideoSource
from mm_grpo.errors import DataError
from mm_grpo.run.evaluations import blind_controls

MP4 = b"\x00\x00\x00\x20ftypisom and more"
PICTURE = Image.new("RGB", (4, 4), "red")
FRAMES = ["f/1.jpg", "f/2.jpg"]
DATA_URL = "data:video/mp4;base64,AAAA"


def read(row: dict[str, Any], **options: Any) -> Fields:
    return fields_of({"prompt": "What?", **row}, **options)


def refusal(row: dict[str, Any]) -> str:
    return fields_refusal({"prompt": "What?", **row})


def sources(fields: Fields) -> list[Any]:
    return [video.source for video in fields.videos]


@pytest.mark.parametrize(
    ("columns", "videos"),
    [
        ({"video": "a.mp4"}, ["a.mp4"]),
        ({"video": MP4, "videos": []}, [MP4]),
        ({"video": {"bytes": MP4, "path": None}}, [{"bytes": MP4, "path": None}]),
        ({"video": "tumblr.gif"}, ["tumblr.gif"]),
        ({"videos": "a.mp4"}, ["a.mp4"]),
        ({"videos": ["a.mp4", Path("b.mkv")]}, ["a.mp4", Path("b.mkv")]),
        ({"video": ["a.mp4", "b.gif"]}, ["a.mp4", "b.gif"]),
        # frames: a list of images is one video in `video`, and in `videos` a list in the list
        ({"video": FRAMES}, [FRAMES]),
        ({"video": (PICTURE, png(), {"bytes": png(), "path": "x"})}, [(PICTURE, png(), {"bytes": png(), "path": "x"})]),
        ({"video": [FRAMES, FRAMES]}, [FRAMES, FRAMES]),
        ({"videos": [FRAMES, "a.mp4"]}, [FRAMES, "a.mp4"]),
        ({"videos": [{"video": FRAMES, "fps": None}]}, [FRAMES]),
        ({"video": None, "videos": [], "video_1": "a.webm", "video_2": "b.avi", "video_3": None}, ["a.webm", "b.avi"]),
    ],
)  # fmt: skip
def test_columns_of_videos(columns: dict[str, Any], videos: list[Any]) -> None:
    fields = read(columns)
    assert sources(fields) == videos and fields.images == ()
    assert fields.messages[0]["content"] == [*[VIDEO] * len(videos), text("What?")]
    assert fields.other_columns == {} and set(fields.used.values()) == {"prompt", "videos"}


SHOWN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"video": "a.mp4"}, {}),
    ({"video": "file:///a.mp4", "fps": 1, "max_frames": 8.0}, {"fps": 1, "max_frames": 8}),
    ({"path": "a.mp4", "start": 3, "end": 8.5}, {"start": 3, "end": 8.5}),
    (
        {"video": "a.mp4", "video_start": 0.0, "video_end": 2, "nframes": 16},
        {"start": 0, "end": 2, "frames": 16},
    ),
    ({"video_url": {"url": "a.mp4", "fps": 0.5}}, {"fps": 0.5}),
    ({"video": FRAMES, "sample_fps": 2, "raw_fps": 30}, {"fps": 2}),
    ({"video": FRAMES, "fps": 4.0, "nframes": None, "detail": "auto"}, {"fps": 4.0}),
]


@pytest.mark.parametrize(("entry", "settings"), SHOWN)
def test_what_is_shown_of_a_video_stands_in_its_entry_or_its_part(entry: Any, settings: Any) -> None:
    video = VideoSource(next(iter(entry.values())), **settings)
    video = VideoSource("a.mp4", **settings) if "video_url" in entry else video
    own = {"type": "video_url" if "video_url" in entry else "video", **entry}
    for row in ({"videos": [entry]}, {"video": entry}, {"prompt": user(own, text("?"))}):
        assert read(row).videos == (video,)


def test_a_part_may_set_what_is_shown_of_its_entry() -> None:
    part = {**VIDEO, "fps": 1.0, "max_pixels": 900, "index": 1}
    entries = ["a.mp4", {"video": "b.mp4", "start": 2, "max_pixels": 800, "min_pixels": 100}]
    fields = read({"prompt": user(part, {**VIDEO, "index": 0}), "videos": entries})
    assert fields.videos == (VideoSource("b.mp4", fps=1.0, start=2), VideoSource("a.mp4"))
    limits = {"min_pixels": 100, "max_pixels": 900}
    assert fields.messages[0]["content"] == [{**VIDEO, **limits}, VIDEO]
    # limits of a source are of images
    row = {"prompt": user(IMAGE, VIDEO), "image": "a.png", "video": "a.mp4"}
    fields = read(row, pixel_limits={"max_pixels": 9})
    assert fields.messages[0]["content"] == [{**IMAGE, "max_pixels": 9}, VIDEO]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        *(({"fps": value}, "fps") for value in (0, -1, float("nan"), "2", True, float("inf"))),
        *(({"nframes": value}, "frames") for value in (1, 2.5, -4)),
        ({"max_frames": 0}, "max_frames"),
        ({"start": -1}, "start"),
        ({"start": 8, "end": 3}, "end"),
        ({"end": 0}, "end"),
        ({"video_end": float("nan")}, "end of the video"),
        ({"fps": 1, "nframes": 4}, "nframes"),
        ({"start": 1, "video_start": 1}, "video_start"),
        ({"sample_fps": 2}, "sample_fps"),
        ({"video": FRAMES, "start": 1}, "start"),
        ({"video": FRAMES, "nframes": 8}, "nframes"),
        ({"video": FRAMES, "fps": 1, "sample_fps": 1}, "sample_fps"),
        ({"total_pixels": 9}, "total_pixels"),
        ({"min_frames": 4}, "min_frames"),
        ({"path": "b.mp4"}, "path"),
        ({"resized_height": 8}, "resized_height"),
        ({"video": "a.jpg"}, "'image'"),
        ({"video": []}, "[]"),
        ({"video": {"path": "a.mp4", "fps": 2}}, "'fps'"),
        ({"fps": np.zeros((2, 200))}, "fps"),
        ({"video": ["f/1.jpg", None]}, "None"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(settings: dict[str, Any], key: str) -> None:
    part = {**VIDEO, "video": "a.mp4", **settings}
    message = refusal({"prompt": user(text("?"), part)})
    assert message.startswith("row 3: prompt[0].content[1]: ") and key in message and "\n" not in message
    message = refusal({"videos": ["b.mp4", {"video": "a.mp4", **settings}]})
    assert message.startswith("row 3: videos[1]: ") and key in message


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"videos": FRAMES}, ("videos[0]", "'f/1.jpg'", "'video'")),  # one video, or two of one frame?
        ({"video": ["f/1.jpg", "a.mp4"]}, ("video[0]", "'f/1.jpg'")),
        ({"video": PICTURE}, ("video[0]", "'image'")),
        ({"videos": ["a.mp4", None]}, ("videos[1] is null",)),
        ({"videos": [{"fps": 2}]}, ("videos[0]", "'video'")),
        ({"videos": [{"file": "a.mp4"}]}, ("videos[0]", "'file'")),
        ({"images": [{"image": "a.png", "fps": 2}]}, ("images[0]", "'fps'")),
        ({"video": "a.mp4", "videos": ["b.mp4"]}, ("'video' and 'videos'",)),
        ({"prompt": user(VIDEO, VIDEO), "video": "a.mp4"}, ("video parts in the prompt: 2", "videos in the row: 1")),
        ({"prompt": user({**VIDEO, "index": 1}), "video": "a.mp4"}, ("numbers 1", "videos in the row: 1")),
        ({"prompt": user(text("?")), "video": "a.mp4"}, ("video parts in the prompt: 0",)),
        ({"prompt": user(IMAGE), "image": "a.png", "video": "a.mp4"}, ("video parts in the prompt: 0",)),
        ({"prompt": user(VIDEO, text("<video>")), "video": "a.mp4"}, ("'<video>'", "'type': 'video'")),
        ({"prompt": "<video>?"}, ("'<video>'", "no video")),
        ({"prompt": "<video>?", "image": "a.png"}, ("'<video>'", "no video")),
        ({"prompt": "<video 1>?", "image": "a.png"}, ("'<video 1>'", "no video")),
        ({"prompt": "<video>?", "clip": "a.mp4"}, ("'<video>'", "data.columns.videos=clip")),
        ({"prompt": "<video><video>?", "video": "a.mp4"}, ("<video> tags in the prompt: 2", "videos in the row: 1")),
        ({"prompt": "<video 2>?", "video": "a.mp4"}, ("numbers 2", "videos in the row: 1")),
        ({"prompt": "<|video_pad|>?", "video": "a.mp4"}, ("'<|video_pad|>'", "<video>")),
        # <image> for a video: as many as videos, and nothing else
        ({"prompt": "<image>\n<image>?", "video": "a.mp4"}, ("<image> tags in the prompt: 2", "images in the row: 0")),
        ({"prompt": "<image><video>?", "video": "a.mp4"}, ("<image> tags in the prompt: 1", "images in the row: 0")),
        ({"prompt": "<image>?", "image": "a.png", "video": "a.mp4"}, ("<video> tags in the prompt: 0",)),
        ({"video_1": "a.mp4", "video_3": "b.mp4", "video_2": None}, ("'video_2'", "'videos'")),
    ],
)  # fmt: skip
def test_a_row_that_is_ambiguous_or_incomplete_is_refused(row: Any, words: tuple[str, ...]) -> None:
    message = refusal(row)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("prompt", "content"),
    [
        ("What?", [IMAGE, VIDEO, VIDEO, text("What?")]),
        ("<video>Is <image> in <video>?", [VIDEO, text("Is "), IMAGE, text(" in "), VIDEO, text("?")]),
        ("<|video_2|><image 1><Video 1>?", [VIDEO, IMAGE, VIDEO, text("?")]),
        (user(VIDEO, text("?"), IMAGE, VIDEO), [VIDEO, text("?"), IMAGE, VIDEO]),
        (user({**VIDEO, "index": 1.0}, IMAGE, {**VIDEO, "index": 0}), [VIDEO, IMAGE, VIDEO]),
        (user({"type": "video_url", "video_url": "b.mp4"}, VIDEO, VIDEO, IMAGE), [VIDEO, VIDEO, VIDEO, IMAGE]),
    ],
)  # fmt: skip
def test_images_and_videos_of_one_row_keep_their_places(prompt: Any, content: Any) -> None:
    fields = read({"prompt": prompt, "image": "i.png", "videos": ["a.mp4", "b.mp4"]})
    assert fields.messages[0]["content"] == content and fields.images == ("i.png",)
    numbered = "2" in str(prompt) or "1.0" in str(prompt)
    own = ["b.mp4"] if "url" in str(prompt) else []
    assert sources(fields) == [*own, *(["b.mp4", "a.mp4"] if numbered else ["a.mp4", "b.mp4"])]


def test_the_word_video_stays_text() -> None:
    row = {"prompt": "What is a <video> placeholder?"}
    assert read(row, text_only=True).messages[0]["content"] == row["prompt"]
    words = "A <video game>, <videos> and <video controls src=x></video>?"
    assert read({"prompt": words, "video": "a.mp4"}).messages[0]["content"] == [VIDEO, text(words)]


def turns(human: str, gpt: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": human}, {"from": "gpt", "value": gpt}]


ASKED = [VIDEO, text("What is she doing?")]
VIDEO_R1 = {
    "problem_id": 2, "problem": "What is she doing?", "data_type": "video", "problem_type": "multiple choice",
    "options": ["A. Running.", "B. Cooking."], "solution": "<answer>B</answer>",
    "path": "./LLaVA-Video-178K/academic_source/v_1.mp4", "data_source": "LLaVA-Video-178K/0_30_s",
}  # fmt: skip
REPLY = {"role": "assistant", "content": "B"}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, str], Any, VideoSource]] = {
    # columns and forms of published sets and of other trainers, with our texts: a row, the columns to set, the question
    "lmms-lab/LLaVA-Video-178K": (
        {"id": "v_1", "conversations": turns("<image>\nWhat is she doing?", "B"), "data_source": "0_30_s_nextqa",
         "video": "NextQA/NExTVideo/1164/3238737531.mp4"},
        {}, [VIDEO, text("\nWhat is she doing?")], VideoSource("NextQA/NExTVideo/1164/3238737531.mp4"),
    ),
    "Video-R1/Video-R1-data": (VIDEO_R1, {"video": "path"}, ASKED, VideoSource(VIDEO_R1["path"])),
    "ms-swift": (
        {"messages": [{"role": "user", "content": "<video>What is she doing?"}, REPLY], "videos": ["/data/x.mp4"]},
        {}, ASKED, VideoSource("/data/x.mp4"),
    ),
    "OpenAI": (
        {"messages": user({"type": "video_url", "video_url": {"url": DATA_URL}}, ASKED[1]), "answer": "B"},
        {}, ASKED, VideoSource(DATA_URL),
    ),
    "TRL": ({"prompt": user(VIDEO, ASKED[1]), "videos": ["x.mp4"], "answer": "B"}, {}, ASKED, VideoSource("x.mp4")),
    "verl": (
        {"data_source": "d", "prompt": [{"role": "user", "content": "<video>What is she doing?"}],
         "videos": [{"type": "video", "video": "file:///data/x.mp4", "fps": 1.0, "max_frames": None}],
         "reward_model": {"style": "rule", "ground_truth": "B"}, "extra_info": {"index": 0}},
        {}, ASKED, VideoSource("file:///data/x.mp4", fps=1.0),
    ),
    "EasyR1": (
        {"problem": "<video>What is she doing?", "answer": "B", "videos": ["x.mp4"]}, {}, ASKED, VideoSource("x.mp4"),
    ),
    "OpenGVLab/VideoChat2-IT": (
        {"video": "x.mp4", "QA": [{"i": "Answer.", "q": "What is she doing?", "a": "B"}]},
        {"prompt": "QA.0.q", "answer": "QA.0.a"}, ASKED, VideoSource("x.mp4"),
    ),
    "Charades-STA": (
        {"video": "AO8RW.mp4", "query": "What is she doing?", "timestamps": [0.0, 6.9], "answer": "B"},
        {"prompt": "query"}, ASKED, VideoSource("AO8RW.mp4"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["list", "jsonl", "parquet"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sets_of_videos(name: str, kind: str, tmp_path: Path) -> None:
    row, columns, asked, video = PUBLISHED[name]
    rows: Any = [row, row]
    if kind == "jsonl":
        rows = write_rows(tmp_path / "rows.jsonl", *rows)
    elif kind == "parquet":
        rows = tmp_path / "rows.parquet"
        datasets.Dataset.from_list([row, row]).to_parquet(str(rows))
    read_rows = load_train(config(columns=columns), rows)
    for index in range(2):
        fields = read_rows.fields(index)
        assert fields.messages[-1] == {"role": "user", "content": asked}
        assert (fields.videos, fields.images, fields.columns["answer"]) == ((video,), (), "B")


@pytest.mark.parametrize(
    ("row", "columns", "words"),
    [
        (VIDEO_R1, {}, ("'path' looks like videos", "data.columns.videos=path")),
        # its rows of images stand in the same file
        ({**VIDEO_R1, "data_type": "image", "path": "./x.jpg"}, {"video": "path"}, ("'./x.jpg'", "'image'")),
        (PUBLISHED["OpenGVLab/VideoChat2-IT"][0], {}, ("no column 'prompt'", "'QA'")),
        (PUBLISHED["Charades-STA"][0], {}, ("no column 'prompt'", "data.columns.prompt=query")),
    ],
)
def test_a_set_that_needs_a_setting_says_which(row: Any, columns: Any, words: tuple[str, ...]) -> None:
    message = rows_refusal([row], columns=columns)
    assert message.startswith("train row 0: ") and all(word in message for word in words), message


@pytest.mark.parametrize(
    "columns",
    [
        *({"x": name} for name in ("a.mp4", "v/b.MOV", "c.webm", "d.mkv", "e.avi", "f.m4v", "https://x.org/a.mp4?b=1")),
        {"x": MP4},
        {"x": b"\x1aE\xdf\xa3 webm"},
        {"x": {"bytes": MP4, "path": None}},
        {"x": {"bytes": None, "path": "a.mp4"}},
        {"x": DATA_URL},
        {"clip": "000017"},
        {"video_path": "NextQA/17"},
    ],
)  # fmt: skip
def test_a_column_that_looks_like_videos_is_refused(columns: dict[str, Any]) -> None:
    name = next(iter(columns))
    message = rows_refusal([{"prompt": "?"}, {"prompt": "?", **columns}])
    assert f"the column {name!r} looks like videos" in message and f"data.columns.videos={name}" in message
    assert len(load_train(config(text_only=True), [{"prompt": "?", **columns}])) == 1


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"video": "a.mp4"}, None),  # a set of videos alone is whole
        ({"video": "a.mp4", "source": "nextqa/a.mp4", "video_id": 7, "duration": 2.5}, None),
        ({"video": FRAMES, "first": "f/1.jpg", "from_file": "a.mp4"}, None),
        ({"video": "a.mp4", "thumbnail": "a.jpg"}, "data.columns.images=thumbnail"),
        ({"image": PICTURE, "film": "a.mp4"}, "data.columns.videos=film"),
        ({"video": "a.mp4", "second": "b.mp4"}, "video_2: second"),
        ({"video": "a.mp4", "raw": MP4}, "video_2: raw"),
    ],
)
def test_media_that_are_not_shown_beside_others_are_named(
    columns: dict[str, Any], named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    load_train(config(), [{"prompt": "?", **columns}])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (named is not None) and all(str(named) in message for message in messages)


def test_videos_that_datasets_would_decode_stay_encoded() -> None:
    videos = {n: datasets.Video() for n in ("video", "other")}
    features = datasets.Features(videos | {"prompt": datasets.Value("string")})
    columns = {"video": ["a.mp4"], "other": ["b.mp4"], "prompt": ["?"]}
    rows = datasets.Dataset.from_dict(columns, features=features)
    fields = load_train(config(), rows).fields(0)
    assert sources(fields) == [{"bytes": None, "path": "a.mp4"}]
    assert load_train(config(), rows)._rows[0]["other"] == {"bytes": None, "path": "b.mp4"}  # type: ignore[attr-defined]


def test_the_key_of_a_video_is_of_its_source_and_of_what_is_shown(tmp_path: Path) -> None:
    video = VideoSource("a.mp4", fps=2.0, start=1.0)
    assert media_key(video) == media_key(VideoSource(Path("a.mp4"), fps=2.0, start=1.0))
    others = [
        VideoSource("b.mp4", fps=2.0, start=1.0),
        VideoSource("a.mp4", fps=2.0),
        VideoSource("a.mp4", start=1.0),
    ]
    assert media_key(video) not in map(media_key, others)
    same = VideoSource([Image.new("RGB", (4, 4), "red"), "x.png"])
    other = VideoSource(["x.png", PICTURE])
    assert media_key(VideoSource((PICTURE, "x.png"))) == media_key(same) != media_key(other)
    assert media_key(video, tmp_path) == media_key(VideoSource(str(tmp_path / "a.mp4"), fps=2.0, start=1.0))


def dataset(*media: tuple[list[str], list[str]]) -> Dataset:
    rows = [{"prompt": f"q{n}", "images": i, "videos": v} for n, (i, v) in enumerate(media)]
    return Dataset(rows, config().data)


def test_videos_are_exchanged_among_rows_with_as_many_images_and_videos() -> None:
    rows = dataset((["a.png"], ["a.mp4"]), ([], ["b.mp4"]), (["c.png"], ["c.mp4"]), ([], ["d.mp4"]), ([], []))
    shuffled = rows.control("shuffled")
    assert shuffled._image_rows == [2, 3, 0, 1, 4]
    words = r"^train row 0: .* 0 image\(s\) and 1 video\(s\) .*: 2 of 2 are equal"
    with pytest.raises(DataError, match=words):
        dataset(([], ["a.mp4"]), ([], ["a.mp4"])).control("shuffled")


def test_a_set_of_videos_alone_has_a_blind_control() -> None:
    rows = dataset(([], ["a.mp4"]), ([], ["b.mp4"]))
    control = blind_controls({"clips": rows, "texts": dataset(([], []))}, "shuffled")
    assert control.keys() == {"clips"} and control["clips"]._image_rows == [1, 0]  # type: ignore[attr-defined]


def test_removed_media_leave_the_text() -> None:
    sample = dataset((["a.png"], ["a.mp4"])).control("removed").sample(0)
    assert (sample.images, sample.videos) == ((), ())
    assert sample.messages == ({"role": "user", "content": [text("q0")]},)


def test_rows_with_the_same_videos_are_the_same_row() -> None:
    rows = dataset(([], ["a.mp4"]), ([], ["b.mp4"])), dataset(([], ["a.mp4"]), ([], ["c.mp4"]))
    (sentence,) = shared_rows(rows[0].row_keys(), {"eval": [*rows[1].row_keys()]})
    assert sentence.startswith("eval: 1 of 2 rows")
    frames = Dataset([{"prompt": "q0", "video": [PICTURE, PICTURE]}], config().data)
    assert [*frames.row_keys()] == []  # as rows with PIL images


def test_messages_kept_as_json_text_hold_videos(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fields = read({"prompt": json.dumps(user(VIDEO, text("?"))), "video": "a.mp4"})
    assert fields.messages[0]["content"] == [VIDEO, text("?")] and sources(fields) == ["a.mp4"]
