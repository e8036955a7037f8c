"""Rows that `mm-grpo check --pass-rate-file` writes are the rows that were answered."""

from __future__ import annotations

from pathlib import Path

from helpers import tiny

from mm_grpo.config import GRPOConfig
from mm_grpo.data.jsonl import write_jsonl
from mm_grpo.data.sources import load_train
from mm_grpo.preflight.pass_rates import plain_rows


def test_rows_with_images_and_videos_are_written_and_read_back(tmp_path: Path) -> None:
    """Frames to the pixel, with times from 0; parts keep their order."""
    one, two = tiny.video(1, 4, 40, 30), tiny.video(2, 6, 30, 40)
    order = [{"type": "video"}, {"type": "image"}, {"type": "video"}, {"type": "text", "text": "which?"}]
    videos = [{"video": list(one.frames), "fps": 0.75}, {"video": list(two.frames), "fps": 3}]
    first = {"prompt": [{"role": "user", "content": order}], "images": [tiny.picture(1)], "videos": videos}
    rows = [{"prompt": "left out", "video": videos[0]}, {**first, "answer": "b"}]
    config = GRPOConfig.from_dict({"model": {"path": "m"}})
    write_jsonl(plain_rows(load_train(config, rows), [1]), tmp_path / "rows.jsonl")
    again = load_train(config.with_values({"data.train": str(tmp_path / "rows.jsonl")}))
    sample = again.sample(0)
    assert len(again) == 1 and sample.other_columns == {"answer": "b"}
    assert [part["type"] for part in sample.messages[0]["content"]] == ["video", "image", "video", "text"]
    assert sample.images[0].tobytes() == tiny.picture(1).tobytes()
    for shown, video, fps in zip(sample.videos, (one, two), (0.75, 3.0), strict=True):
        assert [frame.tobytes() for frame in shown.frames] == [frame.tobytes() for frame in video.frames]
        assert shown.fps == fps and shown.times == tuple(i / fps for i in range(len(video.frames)))
