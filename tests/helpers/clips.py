"""Small videos whose frames carry their numbers: `write_clip` makes a file, `number_of` reads a decoded frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

BLOCK, COLUMNS, ROWS = 16, 6, 2
SIZE = (BLOCK * COLUMNS, BLOCK * ROWS)
"""(width, height) of a frame in pixels: a white or black block for each of 12 bits."""
TICK = Fraction(1, 90_000)


def numbered_frame(number: int, scale: int = 1) -> np.ndarray:
    """Pixels [H, W, 3] that show a number below 4,096."""
    bits = np.array([number >> bit & 1 for bit in range(COLUMNS * ROWS)]).reshape(ROWS, COLUMNS)
    shades = np.kron(bits, np.ones((BLOCK * scale, BLOCK * scale))) * 255
    return np.repeat(shades[..., None], 3, axis=2).astype(np.uint8)


def number_of(frame: Image.Image) -> int:
    """The number that a frame of any size shows."""
    blocks = frame.convert("L").resize((COLUMNS, ROWS), Image.Resampling.BOX)
    means = np.asarray(blocks, dtype=float).ravel()
    assert (np.abs(means - 127) > 60).all(), "a block is neither black nor white"
    return sum(1 << bit for bit, mean in enumerate(means) if mean > 127)


def write_clip(
    path: Path,
    times: Iterable[Fraction | float],
    *,
    codec: str = "libx264",
    rate: Fraction | int = 30,
    gop: int = 12,
    scale: int = 1,
    options: dict[str, str] | None = None,
    pixels: str = "yuv420p",
    sound: float = 0.0,
    container: dict[str, str] | None = None,
    numbers: Sequence[int] | None = None,
) -> Path:
    """Write frame k at `times[k]` seconds; `sound` seconds of silence beside them."""
    with av.open(str(path), "w", options=container or {}) as file:
        stream = file.add_stream(codec, rate=rate, options={"g": str(gop), **(options or {})})
        stream.width, stream.height, stream.pix_fmt = SIZE[0] * scale, SIZE[1] * scale, pixels
        by_rate = path.suffix in (".avi", ".ts", ".wmv") or codec == "ffv1"
        tick = 1 / Fraction(rate) if by_rate else _TICKS.get(codec, TICK)
        stream.codec_context.time_base = tick
        silence = file.add_stream("aac", rate=8000) if sound else None
        for count, time in enumerate(times):
            number = count if numbers is None else numbers[count]
            frame = av.VideoFrame.from_ndarray(numbered_frame(number, scale), format="rgb24")
            frame.pts, frame.time_base = round(Fraction(time) / tick), tick
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
        for start in range(0, int(sound * 8000), 1024) if silence else ():
            zeros = np.zeros((1, 1024), np.float32)
            samples = av.AudioFrame.from_ndarray(zeros, format="fltp", layout="mono")
            samples.sample_rate, samples.pts, samples.time_base = 8000, start, Fraction(1, 8000)
            file.mux(silence.encode(samples))
        if silence:
            file.mux(silence.encode(None))
    return path


# MPEG-4 has at most 65,535 ticks a second
_TICKS = {"mpeg4": Fraction(1, 60_000), "gif": Fraction(1, 100), "libvpx": Fraction(1, 1000)}
