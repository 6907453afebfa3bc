"""Images and sounds as real PNG and WAV files: text is read from pixels, digits are heard from tones.

Reading text compares each cell of the picture with the shapes of Pillow's own bitmap font; hearing takes the strongest
frequency of each twentieth of a second (Goertzel 1958), one frequency per digit.
"""

from __future__ import annotations

import functools
import io
import math
import string
import wave
from pathlib import Path
from typing import Any

from experiments.exp_7_16_aworld.tool import Place, Server, ToolError

images = Server("images", "Looks at PNG files.")
audio = Server("audio", "Listens to WAV files.")
LETTERS = string.ascii_letters + string.digits
CELL = (6, 11)  # width and height of a letter of the bitmap font
MARGIN = 2
RATE = 8000  # samples per second
TONE = RATE // 20  # samples of a digit
FREQUENCIES = [600 + 120 * digit for digit in range(10)]


@functools.cache
def font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default_imagefont()


@functools.cache
def shapes() -> dict[bytes, str]:
    """Pixels of a cell -> the letter."""
    from PIL import Image, ImageDraw

    found = {}
    for letter in [" ", *LETTERS]:
        cell = Image.new("L", CELL, 255)
        ImageDraw.Draw(cell).text((0, 0), letter, fill=0, font=font())
        found[cell.point(lambda value: 255 * (value > 127)).tobytes()] = letter
    return found


def make_png(text: str, colour: tuple[int, int, int]) -> bytes:
    """A picture of a line of letters and digits, dark on a background of that colour."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (CELL[0] * len(text) + 2 * MARGIN, CELL[1] + 2 * MARGIN), colour)
    for number, letter in enumerate(text):
        ImageDraw.Draw(image).text((MARGIN + CELL[0] * number, MARGIN), letter, fill=(0, 0, 0), font=font())
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@functools.lru_cache(512)
def load_png(path: Path, changed: int) -> Any:
    from PIL import Image

    with Image.open(path, formats=["PNG"]) as image:
        return image.convert("RGB")


def picture(place: Place, file: str) -> Any:
    """The picture. ToolError where the file is none."""
    path = place.path(file)
    try:
        return load_png(path, path.stat().st_mtime_ns)
    except Exception as error:  # Pillow raises whatever a broken file brings about
        raise ToolError("not a png file") from error


@images.tool()
def list_(place: Place) -> str:
    """Pictures that there are."""
    return "; ".join(name for name in place.names() if name.endswith(".png"))


@images.tool(cost=2)
def read(place: Place, file: str) -> str:
    """The text in a picture."""
    image = picture(place, file).convert("L").point(lambda value: 255 * (value > 100))
    count = (image.width - 2 * MARGIN) // CELL[0]
    boxes = [(MARGIN + CELL[0] * number, MARGIN) for number in range(count)]
    cells = [image.crop((x, y, x + CELL[0], y + CELL[1])).tobytes() for x, y in boxes]
    return "".join(shapes().get(cell, "?") for cell in cells).strip() or "nothing found"


@images.tool()
def size(place: Place, file: str) -> str:
    """Width and height of a picture."""
    return " ".join(map(str, picture(place, file).size))


@images.tool()
def colour(place: Place, file: str) -> str:
    """The background of a picture: red, green or blue."""
    pixel = picture(place, file).getpixel((0, 0))
    return ("red", "green", "blue")[max(range(3), key=lambda channel: pixel[channel])]


def make_wav(digits: str) -> bytes:
    """A sound of one tone per digit, with a short pause behind each."""
    samples = bytearray()
    for digit in digits:
        for number in range(TONE):
            value = math.sin(2 * math.pi * FREQUENCIES[int(digit)] * number / RATE)
            samples += int(12000 * value).to_bytes(2, "little", signed=True)
        samples += bytes(2 * TONE)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(bytes(samples))
    return out.getvalue()


@functools.lru_cache(512)
def load_wav(path: Path, changed: int) -> tuple[int, ...]:
    with wave.open(str(path), "rb") as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, RATE):
            raise ValueError("another format")
        data = file.readframes(file.getnframes())
    return tuple(int.from_bytes(data[at : at + 2], "little", signed=True) for at in range(0, len(data) - 1, 2))


def sound(place: Place, file: str) -> tuple[int, ...]:
    """The samples. ToolError where the file is no sound of ours."""
    path = place.path(file)
    try:
        return load_wav(path, path.stat().st_mtime_ns)
    except (wave.Error, EOFError, ValueError) as error:
        raise ToolError("not a wav file") from error


def strength(samples: tuple[int, ...], frequency: int) -> float:
    """Power of a frequency in the samples (Goertzel)."""
    factor = 2 * math.cos(2 * math.pi * frequency / RATE)
    before = last = 0.0
    for sample in samples:
        before, last = last, sample + factor * last - before
    return before * before + last * last - factor * before * last


@functools.lru_cache(512)
def heard(samples: tuple[int, ...]) -> str:
    """The digits in a sound, silence left out."""
    digits = ""
    for start in range(0, len(samples) - TONE + 1, TONE):
        part = samples[start : start + TONE]
        if max(map(abs, part)) > 1000:
            digits += str(max(range(10), key=lambda digit: strength(part, FREQUENCIES[digit])))
    return digits


@audio.tool()
def list__(place: Place) -> str:
    """Sounds that there are."""
    return "; ".join(name for name in place.names() if name.endswith(".wav"))


@audio.tool(cost=2)
def transcribe(place: Place, file: str) -> str:
    """The digits that are heard in a sound."""
    return heard(sound(place, file)) or "nothing found"


@audio.tool()
def length(place: Place, file: str) -> str:
    """Length of a sound in tenths of a second."""
    return str(10 * len(sound(place, file)) // RATE)


@audio.tool()
def loudness(place: Place, file: str) -> str:
    """Largest sample of a sound, in percent of what the format holds."""
    return str(100 * max(map(abs, sound(place, file)), default=0) // 32768)
