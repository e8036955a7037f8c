"""Safe video loading: a video source of a row becomes a few upright RGB frames with their times, fully in memory.

A source is what an image's may be (images.py), or a list of images. In this order:

    open       one of FORMATS; nothing is fetched over a network, and no file is read whole
    limit      size and length by the header, before a frame is decoded
    scan       the times of all frames in the part that is shown: packets are read, none is decoded
    choose     which frames are shown (below)
    decode     from the keyframe before each chosen frame; no other frame is kept
    convert    to RGB of 8 bits by FFmpeg, without tone mapping of HDR; transparency over white
    turn       by the display matrix, as phones write it

How frames are chosen: their number is the part's seconds times `fps`, at least MIN_FRAMES, at most `max_frames` and
the frames that there are, rounded down to an even number; one if the part has one. Their places are evenly spaced from
the time of its first frame to that of its last, and each gets the frame nearest to it. The part lasts from its first
frame to its last and a mean interval more. Frames that have the header's rate, apart from rounding, count as exactly
so: these are the frames that qwen-vl-utils takes. A file of variable rate is shown by its times.

Sample aspect ratios are ignored, as in qwen-vl-utils. Not here: resizing (processors/), and which videos belong to a
row (rows.py).
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple, cast

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.reformatter import VideoReformatter
from PIL import Image

from mm_grpo.data import images
from mm_grpo.data.images import Files, Folder
from mm_grpo.errors import BadMedia, shorten
from mm_grpo.types import Video

MAX_SECONDS, MAX_FRAMES = 3_600, 250_000
"""Limits of the part that is shown; an hour at 60 frames a second has 216,000."""
MAX_DECODED = 2**30
"""Most bytes of the chosen frames; 32 of 3840 × 2160 pixels have 800 MB."""
MIN_FRAMES = 4
"""Fewest frames that are chosen of a part that has as many."""
FORMATS = ("mp4", "mov", "matroska", "webm", "avi", "gif", "flv", "asf", "ogg", "mpegts")
"""Containers by FFmpeg's names. No playlists, because they name other files and addresses."""
VIDEO = images.SourceKind("video", "data:video/mp4;base64,...", "a list of images", max_bytes=16 * 2**30)
_OPTIONS: dict[str, Any] = {"container_options": {"format_whitelist": ",".join(FORMATS)}}
if int(av.__version__.split(".")[0]) < 19:
    _OPTIONS["metadata_errors"] = "replace"  # titles need not be UTF-8; later versions read any
_LEAST, _MOST = {"fps": 1e-3, "start": 0, "end": 0, "max_frames": 2, "frames": 2}, 1e6
"""Bounds of the numbers of a source."""


@dataclass(frozen=True)
class VideoSource:
    """The video of a row, closed, and the part of it that is shown."""

    source: Any
    """A path, a file:// URL, bytes, a mapping with `bytes` or `path`, a data URL (data:video/mp4;base64,...), or a list
    of images, each of which `open_image` opens."""
    fps: float | None = None
    """Frames per second to show of a file; None is `data.video_fps`. Of a list of images: the rate of its frames."""
    start: float | None = None
    """Seconds from the file's first frame to the first that may be shown; None is the first frame."""
    end: float | None = None
    """Seconds from the file's first frame to the last that may be shown; None is the last frame."""
    max_frames: int | None = None
    """Most frames, below `data.video_max_frames`."""
    frames: int | None = None
    """Number of frames, in the place of `fps`, bounded like it (qwen-vl-utils' nframes)."""

    @property
    def sources(self) -> list[Any]:
        """The images of a list, or the one file."""
        return [*self.source] if isinstance(self.source, list | tuple) else [self.source]

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """All fields but the source."""
        return tuple(getattr(self, name) for name in _LEAST)

    @property
    def span(self) -> tuple[float, float]:
        """First and last second that may be shown."""
        return self.start or 0.0, math.inf if self.end is None else self.end

    def check(self, row: str) -> None:
        """Raise BadMedia, naming `row`, if a number is not a legal one."""
        for (name, least), value in zip(_LEAST.items(), self.numbers, strict=True):
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (is_number and least <= value <= _MOST):
                shown = shorten(repr(value))
                raise BadMedia(f"{row}: {name} of the video is {shown}; legal is {least:g} to {_MOST:g}")


class _File(NamedTuple):
    """An open file. Its times are in units of `tick` seconds; `seconds` is its length by the header, 0 if unknown.

    Frames of AVI have an order and no times.
    """

    container: InputContainer
    stream: av.VideoStream
    where: str
    tick: Fraction
    seconds: float
    is_avi: bool


def open_videos(sources: Sequence[VideoSource], *, row: str, **options: Any) -> tuple[Video, ...]:
    """Open the videos of a row by `open_video`."""
    names = images.numbered(row, "video", len(sources))
    return tuple(open_video(s, row=name, **options) for s, name in zip(sources, names, strict=True))


def open_video(
    source: VideoSource,
    *,
    row: str,
    fps: float,
    max_frames: int,
    image_dir: Folder = None,
    files: Files = None,
) -> Video:
    """Choose and decode the frames of one source; of a list of images all, or `max_frames` evenly spaced.

    `row`, `image_dir` and `files` are as in `open_image`. `fps` counts if the source does not say another number.

    Raises:
        BadMedia: the video is missing, not a video, damaged, too long, too large, or has no frame in the part.
    """
    source.check(row)
    if isinstance(source.source, list | tuple):
        return _open_list(source, row, source.fps or fps, max_frames, image_dir, files)
    with _opened(source, row, image_dir, files) as file:
        first = file.stream.start_time or 0
        times, keys = _scan(file, source, first)
        indices, seconds = choose_frames(times, file.tick, file.stream.average_rate, source, fps, max_frames)
        chosen = [times[index] for index in indices]
        distinct = list(dict.fromkeys(chosen))  # a frame may be the nearest to several places
        frames = _alike(_decode(file, distinct, keys), len(distinct), file.where)
        pictures = dict(zip(distinct, frames, strict=True))
        shown_at = tuple(float((time - first) * file.tick) for time in chosen)
        return Video(tuple(pictures[time] for time in chosen), shown_at, len(chosen) / seconds)


def look_at_video(source: VideoSource, row: str, image_dir: Folder, files: Files) -> None:
    """Raise as `open_video` for what the header shows; no frame is decoded."""
    source.check(row)
    if isinstance(source.source, list | tuple):
        for image in source.source:
            images.look_at_image(image, row, image_dir, files, None, ())
    else:
        with _opened(source, row, image_dir, files):
            pass


def _open_list(
    source: VideoSource, row: str, rate: float, max_frames: int, image_dir: Folder, files: Files
) -> Video:
    start, end = source.span
    names = images.numbered(row, "frame", len(source.source))
    shown = [at for at in range(len(names)) if start <= at / rate <= end]
    if not shown:
        raise BadMedia(f"{row}: the video is {len(names)} images, of which none is shown; give it some")
    most = min(max_frames, source.max_frames or max_frames, source.frames or max_frames)
    number = len(shown) if len(shown) <= most else most // 2 * 2
    chosen = [shown[index] for index in _evenly(shown, number)]
    options: Any = {"image_dir": image_dir, "files": files, "count_as": "frames"}
    pictures = (images.open_image(source.source[at], row=names[at], **options) for at in chosen)
    frames = _alike(pictures, number, f"{row}: the video")
    return Video(tuple(frames), tuple(at / rate for at in chosen), number / len(shown) * rate)


@contextmanager
def _opened(source: VideoSource, row: str, image_dir: Folder, files: Files) -> Iterator[_File]:
    """Open a file within the limits. Faults of FFmpeg and of the disk are BadMedia, also in the body."""
    encoded, where = images.open_encoded(source.source, row, image_dir, VIDEO, files)
    is_video = False
    with encoded:
        try:
            with av.open(encoded, **_OPTIONS) as container:
                is_video = True
                yield _look(cast(InputContainer, container), source, where)
        # IndexError: a stream begins in the midst
        except (av.error.FFmpegError, OSError, IndexError) as error:
            if is_video:
                raise _damaged(where, getattr(error, "strerror", None) or error) from None
            encoded.seek(0)
            raise images.not_readable(where, "a whole video", encoded.read(64), FORMATS) from None


def _look(container: InputContainer, source: VideoSource, where: str) -> _File:
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams or streams[0].codec_context is None:
        raise BadMedia(f"{where} has no pictures that FFmpeg can decode; write it again, such as with H.264")
    stream, context = streams[0], streams[0].codec_context
    images.limit_pixels((context.width, context.height), where)
    context.options = {"max_pixels": str(images.MAX_PIXELS)}  # frames may be larger than the header says
    context.thread_count = 1  # rows are opened by several threads
    base = stream.time_base or Fraction(1, av.time_base)
    tick, is_avi = Fraction(base.numerator, base.denominator), container.format.name == "avi"
    # the duration of an AVI file is cut to what it holds, Matroska has it in a tag
    own = float((stream.frames if is_avi else stream.duration or 0) * tick)
    with suppress(KeyError, ValueError):
        parts = stream.metadata["DURATION"].split(":")
        own = own or sum(float(part) * 60**place for place, part in enumerate(reversed(parts)))
    seconds = own or (container.duration or 0) / av.time_base
    start, end = source.span
    _limit(min(seconds, end) - start, MAX_SECONDS, "seconds", where)
    # the file's length may be that of its sound
    seconds = seconds if own or len(container.streams) == 1 else 0.0
    return _File(container, stream, where, tick, seconds, is_avi)


def _scan(file: _File, source: VideoSource, first: int) -> tuple[list[int], list[int]]:
    """Return the times of the part's frames, and of keyframes, also one before them, in order; nothing is decoded."""
    # Matroska and FLV round times to milliseconds
    start, end = source.span
    low, high = first + math.ceil(max(start - 1e-3, 0) / file.tick), first + (end + 1e-3) / file.tick
    times, keys, last = set[int](), list[int](), first
    for packet, time in _seek(file, low) if start and not file.is_avi else _packets(file):
        if packet.is_keyframe:
            keys.append(time)
        last = max(last, time + (packet.duration or 0))
        # an edit list may hide frames
        if not packet.is_discard and low <= time <= high:
            times.add(time)
        _limit(len(times), MAX_FRAMES, "frames", file.where)
        _limit(float((time - low) * file.tick), MAX_SECONDS, "seconds", file.where)
        if packet.dts is not None and packet.dts > high:
            break
    else:
        # the header counts from 0, or from the first frame
        length = float((last - min(first, 0)) * file.tick)
        if length < 0.9 * file.seconds - 1:
            raise _damaged(file.where, f"it has {length:.1f} of {file.seconds:.1f} seconds")
    if not times:
        until = float((last - first) * file.tick)
        raise BadMedia(
            f"{file.where} has no frame from {start:g} to {end:g} seconds; its frames end at {until:.3f}"
        )
    return sorted(times), sorted(keys)


def _packets(file: _File) -> Iterator[tuple[av.Packet[av.VideoStream], int]]:
    """Yield packets with their frames' times, from the next keyframe on, without those of earlier pictures."""
    key: int | None = None
    for packet in file.container.demux(file.stream):
        time = packet.dts if file.is_avi else packet.pts
        if packet.size and (time is None or packet.is_corrupt):
            raise _damaged(file.where, "a packet is cut off, or has no time")
        if key is None and packet.is_keyframe:
            key = time
        if time is not None and key is not None and time >= key:
            yield packet, time


def _seek(file: _File, time: int) -> Iterator[tuple[av.Packet[av.VideoStream], int]]:
    """Return packets from a keyframe at or before `time` on."""
    # a seek may land behind the keyframe that it aims at if the container has no index
    for seconds in (0, 1, 10, 100):
        with suppress(av.error.FFmpegError):
            file.container.seek(time - int(seconds / file.tick), stream=file.stream)
            packets = _packets(file)
            packet = next(packets, None)
            if packet is not None and packet[1] <= time:
                return chain([packet], packets)
    raise _damaged(file.where, f"nothing can be read at {float(time * file.tick):.3f} seconds")


def choose_frames(
    times: Sequence[int],
    tick: Fraction,
    rate: Fraction | None,
    source: VideoSource,
    fps: float,
    max_frames: int,
) -> tuple[list[int], float]:
    """Return the indices of the frames that are shown, and the seconds that all last.

    `times` [N] are those of all frames in the part, ascending in units of `tick` seconds; `rate` is the header's.
    """
    count, first = len(times), times[0]
    places = times
    mean = Fraction(times[-1] - first, count - 1) * tick if count > 1 else 1 / Fraction(source.fps or fps)
    if rate:
        step = 1 / (Fraction(rate.numerator, rate.denominator) * tick)
        unit, length = step.denominator, step.numerator  # integers, because fractions are slow
        if all(abs((time - first) * unit - n * length) < unit for n, time in enumerate(times)):
            places, mean = range(count), step * tick
    seconds = float(count * mean)
    wanted = max(seconds * (source.fps or fps), MIN_FRAMES)
    if source.frames is not None:
        wanted = round(source.frames / 2) * 2
    number = int(min(wanted, max_frames, source.max_frames or max_frames, count)) // 2 * 2
    return list(_evenly(places, number or 1)), seconds


def _evenly(places: Sequence[int], number: int) -> Iterator[int]:
    """Yield the indices of `number` places: the nearest to evenly spaced ones from the first to the last."""
    for step in range(number):
        target = places[0] + Fraction((places[-1] - places[0]) * step, max(number - 1, 1))
        after = bisect_left(places, target)
        yield min((max(after - 1, 0), after), key=lambda index: abs(places[index] - target))


def _decode(file: _File, times: Sequence[int], keys: Sequence[int]) -> Iterator[Image.Image]:
    """Yield the upright pictures of frames, whose times ascend."""
    position, frames = -math.inf, iter(list[tuple[int, av.VideoFrame]]())
    reformatter = VideoReformatter()
    for time in times:
        # frames of AVI are counted from its first
        key = keys[0] if file.is_avi else keys[bisect_right(keys, time) - 1]
        if key > position:
            frames = _frames(file, key)
        position, frame = next((entry for entry in frames if entry[0] >= time), (math.inf, None))
        if frame is None or position > time or frame.is_corrupt:
            raise _damaged(file.where, f"no frame at {float(time * file.tick):.3f} seconds")
        images.count_decoded("frames")
        has_alpha = any(component.is_alpha for component in frame.format.components)
        rgb = reformatter.reformat(frame, format="rgba" if has_alpha else "rgb24", threads=1)
        pixels = rgb.to_ndarray()
        matrix: Any = frame.side_data.get("DISPLAYMATRIX")
        if matrix is not None:
            pixels = _upright(pixels, bytes(matrix), file.where)
        yield images.to_rgb(Image.fromarray(pixels), file.where)


def _frames(file: _File, key: int) -> Iterator[tuple[int, av.VideoFrame]]:
    """Yield frames with their times, from a keyframe on."""
    times = deque[int]()
    # the decoder gives the frames that it holds back when it gets None
    for packet, time in chain(_seek(file, key), [(None, 0)]):
        times.append(time)
        for frame in file.stream.decode(packet):
            at = times.popleft() if file.is_avi else frame.pts
            if at is not None:
                yield at, frame


def _upright(pixels: Any, matrix: bytes, where: str) -> Any:
    """Turn pixels [H, W, C] by a display matrix, which moves the pixel (x, y) to (ax + cy, bx + dy)."""
    a, b, _, c, d = (max(-1, min(1, round(value / 2**16))) for value in struct.unpack_from("<5i", matrix))
    if {abs(a), abs(b)} != {0, 1} or (abs(a), abs(b)) != (abs(d), abs(c)):
        raise BadMedia(f"{where} is not turned by quarters ({a, b, c, d}); write it upright")
    return (pixels if a else pixels.swapaxes(0, 1))[:: b + d, :: a + c]


def _alike(pictures: Iterable[Image.Image], count: int, where: str) -> list[Image.Image]:
    """Return `count` pictures, which have one size and MAX_DECODED bytes at most."""
    frames: list[Image.Image] = []
    for frame in pictures:
        frames.append(frame)
        _limit(count * frame.width * frame.height * 3, MAX_DECODED, "bytes of decoded frames", where)
        if frame.size != frames[0].size:
            sizes = " and ".join(f"{width} × {height}" for width, height in (frames[0].size, frame.size))
            raise BadMedia(f"{where} has frames of {sizes} pixels; bring all to one size")
    return frames


def _limit(number: float, most: int, noun: str, where: str) -> None:
    if number > most:
        raise BadMedia(
            f"{where} shows {number:,.0f} {noun}, {most:,} at most; show a part of it (start, end) or fewer frames, or "
            "shrink it"
        )


def _damaged(where: str, why: object) -> BadMedia:
    return BadMedia(
        f"{where} is damaged, cut off or encrypted ({why}); write or download it again, or leave the row out"
    )
