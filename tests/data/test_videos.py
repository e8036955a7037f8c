"""Video loading: each frame carries its number, so that a test reads which frames were chosen."""

from __future__ import annotations

import base64
import os
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from helpers.clips import SIZE, number_of, numbered_frame, write_clip
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_grpo.config import DataConfig
from mm_grpo.data import images, videos
from mm_grpo.data.dataset import Dataset
from mm_grpo.data.file_states import FileStates
from mm_grpo.data.images import decoded_here
from mm_grpo.data.videos import VideoSource, choose_frames, look_at_video, open_video
from mm_grpo.errors import BadMedia, DataError
from mm_grpo.types import Video

pytestmark = pytest.mark.lowest
NTSC = Fraction(30_000, 1001)


def opened(source: Any, fps: float = 2.0, max_frames: int = 32, **options: Any) -> Video:
    source = source if isinstance(source, VideoSource) else VideoSource(source)
    return open_video(source, row="train.jsonl:12", fps=fps, max_frames=max_frames, **options)


def numbers(video: Video) -> list[int]:
    return [number_of(frame) for frame in video.frames]


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(BadMedia) as caught:
        opened(source, **options)
    assert str(caught.value).startswith("train.jsonl:12")
    return str(caught.value)


def constant(count: int, rate: Fraction | int) -> list[Fraction]:
    return [number / Fraction(rate) for number in range(count)]


def nearest(times: list[Any], number: int) -> list[int]:
    """Indices of the times that are nearest to `number` evenly spaced ones."""
    wanted = np.linspace(float(times[0]), float(times[-1]), number)
    return [int(np.abs(np.array(times, float) - at).argmin()) for at in wanted]


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Three seconds of 30 frames, with a keyframe every 12."""
    return write_clip(tmp_path / "clip.mp4", constant(90, 30))


# of 90 frames at the rate in the name: floor(90 / rate * 2 / 2) * 2, at least 4
@pytest.mark.parametrize(
    ("suffix", "codec", "rate", "number"),
    [
        ("mp4", "libx264", NTSC, 6),
        ("mp4", "mpeg4", 25, 6),
        ("mov", "libx264", 24, 6),
        ("mkv", "libx264", Fraction(24_000, 1001), 6),
        ("webm", "libvpx", 60, 4),
        ("webm", "libvpx-vp9", 30, 6),
        ("avi", "mpeg4", 30, 6),
        ("flv", "libx264", 15, 12),
        ("ts", "mpeg2video", 25, 6),
        ("wmv", "wmv2", 10, 18),
        ("gif", "gif", 10, 18),
    ],
)
def test_constant_rate(suffix: str, codec: str, rate: Fraction, number: int, tmp_path: Path) -> None:
    times = constant(90, rate)
    reordered = {"bf": "2"} if codec in ("libx264", "mpeg4", "mpeg2video") else None
    pixels = "rgb8" if codec == "gif" else "yuv420p"
    options: Any = {"codec": codec, "rate": rate, "pixels": pixels, "options": reordered}
    path = write_clip(tmp_path / f"a.{suffix}", times, **options)
    video = opened(path)
    assert numbers(video) == nearest(times, number)
    assert video.times == pytest.approx([float(times[index]) for index in numbers(video)], abs=1.1e-3)
    assert video.fps == pytest.approx(number * float(rate) / 90)
    part = opened(VideoSource(path, fps=5, start=float(times[20]), end=float(times[60])))
    assert numbers(part) == [20 + index for index in nearest(times[:41], len(part.frames))]
    assert part.times[0] == pytest.approx(float(times[20]), abs=1.1e-3)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3_000),
    st.sampled_from([10, 24, 25, 30, 60, NTSC, Fraction(24_000, 1001)]),
    st.sampled_from([0.5, 1.0, 2.0, 4.0, 30.0]),
    st.sampled_from([2, 4, 7, 32, 768]),
    st.sampled_from([Fraction(1, 1000), Fraction(1, 90_000)]),
)
def test_constant_rate_is_chosen_as_by_qwen_vl_utils(
    count: int, rate: Fraction, fps: float, most: int, tick: Fraction
) -> None:
    torch, utils = pytest.importorskip("torch"), pytest.importorskip("qwen_vl_utils.vision_process")
    times = [round(time / tick) for time in constant(count, rate)]
    indices, seconds = choose_frames(times, tick, Fraction(rate), VideoSource(""), fps, most)
    assert seconds == pytest.approx(count / rate)
    if count == 1:
        assert indices == [0]
        return
    number = utils.smart_nframes({"fps": fps, "max_frames": min(most, count)}, count, float(rate))
    assert indices == torch.linspace(0, count - 1, number).round().long().tolist()


@pytest.mark.parametrize(("frames", "number"), [(2, 2), (6, 6), (7, 8), (9, 8), (400, 32)])
def test_a_number_of_frames(frames: int, number: int, clip: Path) -> None:
    """Rounded as qwen-vl-utils' nframes."""
    assert numbers(opened(VideoSource(clip, frames=frames))) == nearest(constant(90, 30), number)


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0]), (2, [0, 1]), (3, [0, 2]), (4, [0, 1, 2, 3]), (5, [0, 1, 3, 4])]
)
def test_short_files(count: int, expected: list[int], tmp_path: Path) -> None:
    video = opened(write_clip(tmp_path / "a.mp4", constant(count, 30)))
    assert numbers(video) == expected and video.fps == pytest.approx(len(expected) * 30 / count)


@pytest.mark.parametrize(
    ("suffix", "codec"), [("mp4", "libx264"), ("mkv", "libx264"), ("webm", "libvpx-vp9"), ("gif", "gif")]
)
def test_variable_rate(suffix: str, codec: str, tmp_path: Path) -> None:
    """Half a second of 30 frames, a gap, two seconds of 10 frames: an index rule would show the first half mostly."""
    times = [*constant(15, 30), *(2 + time for time in constant(20, 10))]
    times = [Fraction(round(time * 100), 100) for time in times]  # GIF counts hundredths
    pixels = "rgb8" if codec == "gif" else "yuv420p"
    video = opened(write_clip(tmp_path / f"a.{suffix}", times, codec=codec, pixels=pixels))
    seconds = float(times[-1]) * 35 / 34
    assert numbers(video) == nearest(times, 8) and len(set(numbers(video)[1:4])) < 3
    assert video.times == pytest.approx([float(times[index]) for index in numbers(video)])
    assert video.fps == pytest.approx(8 / seconds)


def test_frames_before_and_behind_a_gap_are_decoded_once(tmp_path: Path) -> None:
    path, before = write_clip(tmp_path / "a.mp4", [0, 0.1, 10, 10.1]), decoded_here()
    video = opened(VideoSource(path, frames=4), max_frames=4)
    assert numbers(video) == [0, 1, 2, 3]
    video = opened(VideoSource(write_clip(tmp_path / "b.mp4", [0, 0.1, 0.2, 10]), frames=4))
    assert numbers(video) == [0, 2, 3, 3] and video.frames[2] is video.frames[3]
    assert decoded_here() - before == {"frames": 7}


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "webm", "flv", "ts"])
def test_times_begin_at_the_first_frame(suffix: str, tmp_path: Path) -> None:
    codec = "libvpx-vp9" if suffix == "webm" else "libx264"
    path = write_clip(tmp_path / f"a.{suffix}", [5 + time for time in constant(60, 30)], codec=codec)
    video = opened(path)
    assert numbers(video) == nearest(constant(60, 30), 4)
    assert video.times == pytest.approx([0, 20 / 30, 39 / 30, 59 / 30], abs=1.1e-3)
    part = opened(VideoSource(path, start=1.0, end=1.5, frames=2))
    assert numbers(part) == [30, 45] and part.times == pytest.approx([1.0, 1.5], abs=1.1e-3)


def test_frames_that_an_edit_list_hides_are_not_shown(tmp_path: Path) -> None:
    """As in files that were cut without encoding: decoding begins 6 frames before the first that is shown."""
    write_clip(tmp_path / "whole.mp4", constant(60, 30))
    with av.open(str(tmp_path / "whole.mp4")) as whole, av.open(str(tmp_path / "cut.mp4"), "w") as cut:
        stream = cut.add_stream_from_template(whole.streams.video[0])
        hidden = 6 * Fraction(1, 30)
        for packet in whole.demux(video=0):
            if packet.pts is not None:
                packet.pts -= int(hidden / packet.time_base)
                packet.dts -= int(hidden / packet.time_base)
                packet.stream = stream
                cut.mux(packet)
    video = opened(tmp_path / "cut.mp4")
    assert numbers(video)[0] == 6 and video.times[0] == 0 and numbers(video)[-1] == 59


def test_only_what_is_needed_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    frames = videos._frames

    def counted(*arguments: Any) -> Any:
        for time, frame in frames(*arguments):
            decoded.append(time)
            yield time, frame

    monkeypatch.setattr(videos, "_frames", counted)
    for suffix in ("mp4", "mkv", "webm"):
        decoded.clear()
        codec = "libvpx-vp9" if suffix == "webm" else "libx264"
        path = write_clip(tmp_path / f"a.{suffix}", constant(600, 30), gop=10, codec=codec)
        assert numbers(opened(path, max_frames=4)) == [0, 200, 399, 599]
        assert len(decoded) <= 1 + 1 + 10 + 10 + 6, suffix  # a decoder gives what it holds at a flush
    assert videos.look_at_video(VideoSource(path), "row", None, None) is None


def matrix_of(quarters: int, flip: bool) -> list[int]:
    """A display matrix: `quarters` turns clockwise after a flip of left and right."""
    (a, b), (c, d) = [(1, 0), (0, 1)], [(-1, 0), (0, 1)]
    turn = np.linalg.matrix_power(np.array([[0, 1], [-1, 0]]), quarters)
    flipped = np.array([[-1 if flip else 1, 0], [0, 1]])
    (a, b), (c, d) = (flipped @ turn).tolist()
    return [a, b, c, d]


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_the_display_matrix_is_applied(quarters: int, flip: bool, clip: Path) -> None:
    """A phone's file: the matrix of the track header is written over."""
    a, b, c, d = (value * 2**16 for value in matrix_of(quarters, flip))
    data = bytearray(clip.read_bytes())
    identity = struct.pack(">9i", 2**16, 0, 0, 0, 2**16, 0, 0, 0, 2**30)
    at = data.index(identity, data.index(b"tkhd"))
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 2**30)
    expected = numbered_frame(89)
    expected = np.rot90(expected[:, ::-1] if flip else expected, -quarters)
    picture = np.asarray(opened(bytes(data)).frames[-1], int)
    assert picture.shape == expected.shape and np.abs(picture - expected).mean() < 8


def test_a_matrix_of_another_angle_is_refused(clip: Path) -> None:
    data = clip.read_bytes()
    identity = struct.pack(">9i", 2**16, 0, 0, 0, 2**16, 0, 0, 0, 2**30)
    slanted = struct.pack(">9i", 46341, 46341, 0, -46341, 46341, 0, 0, 0, 2**30)
    at = data.index(identity, data.index(b"tkhd"))
    assert "quarter" in refusal(data[:at] + slanted + data[at + 36 :])


def test_a_turn_goes_as_ffmpeg_turns() -> None:
    """The file is ffmpeg's, of 64 × 48 red pixels with a white upper left quarter, to be turned a quarter
    anticlockwise; its own player shows white at the lower left."""
    frame = opened(Path(__file__).parent / "turned.mp4").frames[0]
    assert frame.size == (48, 64)
    assert min(frame.getpixel((5, 58))) > 200 and frame.getpixel((5, 5))[1] < 60


@pytest.mark.parametrize(
    ("codec", "pixels", "suffix"),
    [
        ("libx264", "yuv420p10le", "mp4"),
        ("libx264", "yuv444p", "mp4"),
        ("ffv1", "gray16le", "mkv"),
        ("qtrle", "argb", "mov"),
    ],
)
def test_pixels_of_any_kind_become_rgb(codec: str, pixels: str, suffix: str, tmp_path: Path) -> None:
    video = opened(write_clip(tmp_path / f"a.{suffix}", constant(30, 30), codec=codec, pixels=pixels))
    assert numbers(video) == nearest(constant(30, 30), 4) and {f.mode for f in video.frames} == {"RGB"}


def test_transparency_is_laid_over_white(tmp_path: Path) -> None:
    clear, red = Image.new("RGBA", (20, 10)), Image.new("RGBA", (20, 10), "red")
    clear.save(tmp_path / "a.gif", save_all=True, append_images=[red], duration=100, disposal=2)
    assert [f.getpixel((3, 3)) for f in opened(tmp_path / "a.gif").frames] == [(255, 255, 255), (255, 0, 0)]


def test_every_kind_of_source(clip: Path) -> None:
    data, expected = clip.read_bytes(), [0, 18, 36, 53, 71, 89]
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    paths = clip, str(clip), clip.as_uri(), {"path": str(clip), "bytes": None}
    for source in (*paths, data, {"bytes": data}, url):
        assert numbers(opened(source)) == expected
        look_at_video(VideoSource(source), "row", None, None)
    assert numbers(opened("clip.mp4", image_dir=clip.parent)) == expected


def test_titles_need_not_be_unicode(clip: Path) -> None:
    with av.open(str(clip)) as whole, av.open(str(clip.parent / "titled.mp4"), "w") as titled:
        stream = titled.add_stream_from_template(whole.streams.video[0])
        titled.metadata["title"] = "Cafe"
        for packet in whole.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                titled.mux(packet)
    data = (clip.parent / "titled.mp4").read_bytes()
    latin = data.replace(b"Cafe", "Café".encode("latin-1"))
    assert latin != data and numbers(opened(latin)) == [0, 18, 36, 53, 71, 89]


def test_a_list_of_frames(tmp_path: Path) -> None:
    pictures = [Image.fromarray(numbered_frame(number)) for number in range(9)]
    pictures[3].save(tmp_path / "3.png")
    sources: list[Any] = [*pictures[:3], "3.png", *pictures[4:]]
    before = decoded_here()
    video = opened(VideoSource(sources, fps=3), image_dir=tmp_path)
    assert numbers(video) == [*range(9)] and video.fps == 3
    assert video.times == pytest.approx([n / 3 for n in range(9)])
    assert decoded_here() - before == {"frames": 9}
    assert opened(sources, fps=4.0, image_dir=tmp_path).times[-1] == 2  # the config's rate
    thinned = opened(VideoSource(sources, fps=3, max_frames=5), image_dir=tmp_path)
    assert numbers(thinned) == [0, 3, 5, 8] and thinned.fps == pytest.approx(4 / 3)
    part = VideoSource(tuple(sources), fps=1, start=2.0, end=4.5)
    assert numbers(opened(part, image_dir=tmp_path)) == [2, 3, 4]
    look_at_video(VideoSource(sources), "row", tmp_path, None)


def test_frames_of_two_sizes_are_refused(clip: Path) -> None:
    message = refusal([Image.new("RGB", (8, 6)), Image.new("RGB", (8, 7))])
    assert "8 × 6" in message and "8 × 7" in message
    assert "frame 2 of 2" in refusal([Image.new("RGB", (8, 6)), "gone.png"])
    assert "none" in refusal([])


def damaged(path: Path, start: float, end: float) -> bytes:
    """The file with noise in a part of its media data."""
    data = bytearray(path.read_bytes())
    first, last = (int(len(data) * share) for share in (start, end))
    data[first:last] = np.random.default_rng(0).integers(0, 256, last - first, np.uint8).tobytes()
    return bytes(data)


def playlist(path: Path) -> bytes:
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{path}\n#EXT-X-ENDLIST\n".encode()


def late_sound(path: Path) -> bytes:
    """An FLV file whose last packet is of a stream that the header does not name."""
    data, at = bytearray(path.read_bytes()), 13
    while (following := at + 15 + int.from_bytes(data[at + 1 : at + 4])) < len(data):
        last, at = at, following
    data[last] = 8
    return bytes(data)


def sound_alone(folder: Path) -> Path:
    with av.open(str(folder / "a.m4a"), "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=8000)
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        samples.sample_rate = 8000
        file.mux(stream.encode(samples))
        file.mux(stream.encode(None))
    return folder / "a.m4a"


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "missing": lambda clip: clip.parent / "gone.mp4",
    "empty": lambda clip: b"",
    "a folder": lambda clip: clip.parent,
    "a pipe": lambda clip: (os.mkfifo(clip.parent / "pipe"), clip.parent / "pipe")[1],
    "a device": lambda clip: "/dev/zero",
    "an address": lambda clip: "https://example.org/a.mp4",
    "no source": lambda clip: 3,
    "noise": lambda clip: bytes(range(256)) * 9,
    "text": lambda clip: b"hello",
    "a page": lambda clip: b"<!DOCTYPE html><html></html>",
    "a pointer": lambda clip: b"version https://git-lfs.github.com/spec/v1\n",
    "a picture": lambda clip: (Image.new("RGB", (9, 9)).save(clip.parent / "a.png"), clip.parent / "a.png")[
        1
    ],
    "a playlist": playlist,
    "base64 alone": lambda clip: base64.b64encode(clip.read_bytes()).decode(),
    "sound": lambda clip: sound_alone(clip.parent),
    "an unknown codec": lambda clip: clip.read_bytes().replace(b"avc1", b"zzz1"),
    "no index": lambda clip: clip.read_bytes()[:-200],
    "half of MP4": lambda clip: write_clip(
        clip.parent / "b.mp4", constant(60, 30), container={"movflags": "faststart"}
    ).read_bytes()[:-900],
    "half of WebM": lambda clip: half(write_clip(clip.parent / "b.webm", constant(90, 30), codec="libvpx")),
    "half of Matroska with sound": lambda clip: half(
        write_clip(clip.parent / "b.mkv", constant(120, 30), sound=4)
    ),
    "half of AVI": lambda clip: half(
        write_clip(clip.parent / "b.avi", constant(200, 30), codec="mpeg4", scale=3)
    ),
    "damaged": lambda clip: damaged(clip, 0.3, 0.6),
    "start behind the end": lambda clip: VideoSource(clip, start=4.0),
    "an empty part": lambda clip: VideoSource(clip, start=1.01, end=1.02),
    "a part that ends before it starts": lambda clip: VideoSource(clip, start=2, end=1),
    **{
        f"{name} {value}": lambda clip, name=name, value=value: VideoSource(clip, **{name: value})
        for name in ("fps", "start", "end", "max_frames", "frames")
        for value in (float("nan"), float("inf"), -1, 1e300, "2", True)
    },
    **{
        f"{name} 0": lambda clip, name=name: VideoSource(clip, **{name: 0})
        for name in ("fps", "frames", "max_frames")
    },
}


def half(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: len(data) // 2]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, clip: Path, capfd: pytest.CaptureFixture[str]) -> None:
    message = refusal(HOSTILE[name](clip))
    assert "video" in message and "\n" not in message
    assert capfd.readouterr() == ("", "")


def test_a_stream_that_begins_late(clip: Path) -> None:
    """Before av 19 that is an IndexError of its own, unless the byte behind its list of streams happens to be 0."""
    data = late_sound(write_clip(clip.parent / "a.flv", constant(600, 30)))
    try:
        assert numbers(opened(data))[0] == 0
    except BadMedia as error:
        assert int(av.__version__.split(".")[0]) < 19 and "damaged" in str(error)


def test_hostile_headers_are_refused_without_decoding(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and durations are written over in the headers."""
    monkeypatch.setattr(videos, "_decode", lambda *_: pytest.fail("decoded"))
    wide = write_clip(clip.parent / "a.mov", constant(9, 30), codec="qtrle", pixels="rgb24").read_bytes()
    at = wide.index(struct.pack(">HH", *SIZE), wide.index(b"stsd"))
    wide = wide[:at] + struct.pack(">HH", 10_000, 20_000) + wide[at + 4 :]
    long = write_clip(clip.parent / "a.webm", constant(30, 30), codec="libvpx").read_bytes()
    long = long.replace(b"00:00:01.0", b"99:00:01.0")
    for source, words in ((wide, "200000000 pixels"), (long, "356,401 seconds")):
        refusals = [refusal(source)]
        with pytest.raises(BadMedia) as caught:
            look_at_video(VideoSource(source), "train.jsonl:12", None, None)
        assert [words in message for message in (*refusals, str(caught.value))] == [True, True]
    monkeypatch.setattr(videos, "VIDEO", replace(videos.VIDEO, max_bytes=100))
    assert "101 bytes" in refusal(b"x" * 101)


def test_a_long_file_is_refused_unless_a_part_is_shown(tmp_path: Path) -> None:
    """Two hours, a frame every 20 seconds."""
    path = write_clip(tmp_path / "film.mp4", range(0, 7220, 20), rate=1, gop=1, numbers=range(361))
    before = decoded_here()
    for source in (VideoSource(path), VideoSource(path, start=100)):
        assert "seconds" in refusal(source)
        with pytest.raises(BadMedia, match="seconds"):
            look_at_video(source, "row", None, None)
    assert decoded_here() == before
    part = VideoSource(path, start=6000, end=6300, frames=4)
    look_at_video(part, "row", None, None)
    assert numbers(opened(part)) == [300, 305, 310, 315] and decoded_here() - before == {"frames": 4}


@pytest.mark.parametrize(
    ("limit", "value"),
    [("MAX_FRAMES", 89), ("MAX_SECONDS", 2.9), ("MAX_DECODED", 6 * SIZE[0] * SIZE[1] * 3 - 1)],
)
def test_limits_of_the_part(limit: str, value: float, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, limit, value)
    assert f"{value:,}" in refusal(clip)
    assert len(opened(VideoSource(clip, end=2.0)).frames) == 4
    if limit != "MAX_DECODED":  # the header says nothing
        live = write_clip(clip.parent / "a.mkv", constant(90, 30), container={"live": "1"})
        assert f"{value:,}" in refusal(live)


def test_frames_larger_than_the_header_says_are_refused(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder refuses before it allocates them."""
    data = write_clip(clip.parent / "a.webm", constant(9, 30), codec="libvpx").read_bytes()
    sizes = [bytes([0xB0, 0x81, width, 0xBA, 0x81, height]) for width, height in (SIZE, (2, 2))]
    small = data.replace(*sizes)
    assert small != data
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    assert "damaged" in refusal(small) and "3072" in refusal(data)


def test_a_file_that_changes_during_the_run(clip: Path) -> None:
    files = FileStates()
    assert len(opened(clip, files=files).frames) == 6
    clip.write_bytes(clip.read_bytes() + b"\0\0\0\x08free")
    with pytest.raises(DataError, match="changed since the run began") as caught:
        opened(clip, files=files)
    assert not isinstance(caught.value, BadMedia)


def test_threads_share_files_and_bytes(clip: Path) -> None:
    data = clip.read_bytes()
    ready = threading.Barrier(4)

    def open_both(_: int) -> list[list[int]]:
        ready.wait(60)
        return [numbers(opened(source)) for source in (clip, data) * 5]

    with ThreadPoolExecutor(4) as pool:
        assert all(shown == [[0, 18, 36, 53, 71, 89]] * 10 for shown in pool.map(open_both, range(4)))


@pytest.mark.slow
def test_memory_stays_flat(clip: Path) -> None:
    """Resident memory after 50 opens and after 250, also of files that are refused."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    path, broken = write_clip(clip.parent / "large.mp4", constant(20, 30), scale=6), half(clip)
    sizes = []
    for count in range(251):
        opened(path)
        with pytest.raises(BadMedia):
            opened(broken)
        if count in (50, 250):
            sizes.append(resident())
    assert sizes[1] - sizes[0] < 20 * 2**20, "200 opens of 4 MB of frames each"


def rows_of(*videos: list[Any], **data: Any) -> Dataset:
    return Dataset([{"prompt": "?", "videos": entries} for entries in videos], DataConfig(**data))


def test_rows_with_videos_are_samples_with_frames(clip: Path, tmp_path: Path) -> None:
    """Under the settings of the data; paths start at their folder."""
    settings = {"video_fps": 1.0, "video_max_frames": 8, "image_dir": str(tmp_path)}
    rows = rows_of(["clip.mp4", {"video": clip, "fps": 30}], **settings)
    before = decoded_here()
    first, second = rows.sample(0).videos
    assert (numbers(first), len(second.frames)) == (nearest(constant(90, 30), 4), 8)
    assert decoded_here() - before == {"frames": 12}
    rows.look_at_images(0)()


def test_a_row_names_its_video(clip: Path) -> None:
    rows = rows_of([clip], [clip, "gone.mp4"])
    with pytest.raises(BadMedia, match=r"^train row 1, video 2 of 2: video 'gone.mp4' cannot be read"):
        rows.sample(1)
    with pytest.raises(BadMedia, match=r"^train row 1: video 'gone.mp4' cannot be read"):
        rows.look_at_images(1)()
    with pytest.raises(DataError, match=r"^train row 0: 101 videos"):
        rows_of([clip] * 101).sample(0)


def test_shuffled_videos_are_another_rows(clip: Path) -> None:
    other = write_clip(clip.parent / "other.mp4", constant(30, 30), numbers=range(500, 530))
    rows = rows_of([clip], [other], [clip], [{"video": clip, "start": 2.0}])
    shuffled = rows.control("shuffled")
    plain, moved = ([numbers(r.sample(n).videos[0]) for n in range(4)] for r in (rows, shuffled))
    assert all(own != lent for own, lent in zip(plain, moved, strict=True)) and sorted(plain) == sorted(moved)


def test_fingerprints_of_videos(clip: Path) -> None:
    """A copy of a file has the fingerprint, and another part of it another one."""
    first, data = rows_of([clip]).fingerprint(), clip.read_bytes()
    os.utime(clip, (1, 1))
    assert rows_of([clip]).fingerprint() == first
    assert rows_of([{"video": clip, "end": 1.0}]).fingerprint() != first
    clip.write_bytes(data.replace(b"isom", b"mp41"))
    assert rows_of([clip]).fingerprint() != first
