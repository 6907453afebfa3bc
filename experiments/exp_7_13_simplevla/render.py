"""Pictures without a graphics card: the scene seen straight from above, or from the side, drawn by numpy for N scenes at once.

Parallel projection: a block is a rectangle, the gripper two bars that grow brighter with height. No light, no shadow.
"""

from __future__ import annotations

import numpy as np

from experiments.exp_7_13_simplevla.physics import HALF
from experiments.exp_7_13_simplevla.tasks import COLOURS, PADS

COLOUR_RGB = {"red": (214, 60, 50), "green": (60, 160, 75), "blue": (55, 100, 210), "yellow": (235, 190, 40)}
PAD_RGB = (176, 196, 214)
TABLE_RGB, FINGER_RGB = (238, 234, 226), (40, 40, 44)
VIEW = 0.24  # metres from the middle to the edge of a picture
PAD_HALF, FINGER = 0.035, (0.008, 0.014)
BLOCK_RGB = np.array([COLOUR_RGB[name] for name in COLOURS], float)


def paint(image: np.ndarray, centre: np.ndarray, half: tuple[float, float], colour: np.ndarray, round_: bool = False) -> None:
    """Draws a rectangle (or disc) at centre (N, 2) with colour (N, 3) over image (N, H, W, 3); edges are anti-aliased."""
    size = image.shape[1]
    pixel = 2 * VIEW / size
    axis = (np.arange(size) + 0.5) * pixel - VIEW
    across, along = axis[None, None, :] - centre[:, 0, None, None], -axis[None, :, None] - centre[:, 1, None, None]
    if round_:
        inside = (half[0] - np.sqrt(across**2 + along**2)) / pixel + 0.5
        cover = inside.clip(0, 1)
    else:
        cover = ((half[0] - np.abs(across)) / pixel + 0.5).clip(0, 1) * ((half[1] - np.abs(along)) / pixel + 0.5).clip(0, 1)
    image += cover[..., None] * (colour[:, None, None, :] - image)


def from_above(places: np.ndarray, opening: np.ndarray, colour: np.ndarray, pixels: int, half: float = HALF) -> np.ndarray:
    """Pictures (N, H, W, 3), bytes, of objects at places (N, O, 3): gripper, blocks of the colours (N, BLOCKS), pads."""
    count = len(places)
    image = np.empty((count, pixels, pixels, 3))
    image[:] = TABLE_RGB
    pads = places[:, -len(PADS) :]
    for pad in range(len(PADS)):
        paint(image, pads[:, pad, :2], (PAD_HALF, PAD_HALF), np.tile(np.array(PAD_RGB, float), (count, 1)), round_=True)
    for block in range(colour.shape[1]):
        bright = 1 + 1.5 * places[:, 1 + block, 2:3]
        paint(image, places[:, 1 + block, :2], (half, half), (BLOCK_RGB[colour[:, block]] * bright).clip(0, 255))
    shade = np.array(FINGER_RGB, float) + 900 * places[:, 0, 2:3]
    for side in (-1, 1):
        centre = places[:, 0, :2] + np.stack([side * (opening / 2 + FINGER[0]), np.zeros(count)], 1)
        paint(image, centre, FINGER, shade.clip(0, 255))
    return np.rint(image).astype(np.uint8)


def from_the_side(places: np.ndarray, opening: np.ndarray, colour: np.ndarray, pixels: int, half: float = HALF) -> np.ndarray:
    """The same scenes seen along the table, with height upwards: (N, H, W, 3) bytes; the table's top is the lower third."""
    count, ground = len(places), -VIEW / 3
    image = np.empty((count, pixels, pixels, 3))
    image[:] = (250, 250, 250)
    paint(image, np.tile([0.0, ground - VIEW], (count, 1)), (2 * VIEW, VIEW), np.tile(np.array(TABLE_RGB, float), (count, 1)))
    for block in range(colour.shape[1]):
        centre = places[:, 1 + block, [0, 2]] + [0, ground]
        paint(image, centre, (half, half), BLOCK_RGB[colour[:, block]])
    for side in (-1, 1):
        centre = places[:, 0, [0, 2]] + np.stack([side * (opening / 2 + FINGER[0]), np.full(count, ground + 0.01)], 1)
        paint(image, centre, (FINGER[0], 0.025), np.tile(np.array(FINGER_RGB, float), (count, 1)))
    return np.rint(image).astype(np.uint8)
