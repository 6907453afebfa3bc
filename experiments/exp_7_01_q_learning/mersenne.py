"""CPython's random numbers (Mersenne Twister) for compiled code.

`reseed`, `uniform` and `below` do what `random.seed`, `.random` and `.choice` or `.randrange` do, word by word, so that
a compiled run equals both a plain Python program and the companion program of the book with its seed. State:
uint64[625], 624 words of 32 bits and the position. Source: Matsumoto and Nishimura 1998, mt19937ar.
"""

import numpy as np
from numba import njit

WORDS = 624
MASK = np.uint64(0xFFFFFFFF)


def new_state():
    """An empty state; `reseed` it before use."""
    return np.zeros(WORDS + 1, dtype=np.uint64)


@njit(cache=True)
def reseed(mt, number):
    """`random.seed(number)`; 0 <= number < 2**32."""
    mt[0] = 19650218
    for i in range(1, WORDS):
        mt[i] = (np.uint64(1812433253) * (mt[i - 1] ^ (mt[i - 1] >> np.uint64(30))) + np.uint64(i)) & MASK
    i = 1
    for _ in range(WORDS):
        mixed = (mt[i - 1] ^ (mt[i - 1] >> np.uint64(30))) * np.uint64(1664525)
        mt[i] = ((mt[i] ^ mixed) + np.uint64(number)) & MASK
        i += 1
        if i >= WORDS:
            mt[0] = mt[WORDS - 1]
            i = 1
    for _ in range(WORDS - 1):
        mixed = (mt[i - 1] ^ (mt[i - 1] >> np.uint64(30))) * np.uint64(1566083941)
        mt[i] = ((mt[i] ^ mixed) - np.uint64(i)) & MASK
        i += 1
        if i >= WORDS:
            mt[0] = mt[WORDS - 1]
            i = 1
    mt[0] = 0x80000000
    mt[WORDS] = WORDS


@njit(cache=True)
def _refill(mt):
    for i in range(WORDS):
        word = (mt[i] & np.uint64(0x80000000)) | (mt[(i + 1) % WORDS] & np.uint64(0x7FFFFFFF))
        mixed = mt[(i + 397) % WORDS] ^ (word >> np.uint64(1))
        if word & np.uint64(1):
            mixed ^= np.uint64(0x9908B0DF)
        mt[i] = mixed
    mt[WORDS] = 0


@njit(cache=True)
def word(mt):
    """The next 32 random bits."""
    if mt[WORDS] >= WORDS:
        _refill(mt)
    value = mt[mt[WORDS]]
    mt[WORDS] += np.uint64(1)
    value ^= value >> np.uint64(11)
    value ^= (value << np.uint64(7)) & np.uint64(0x9D2C5680)
    value ^= (value << np.uint64(15)) & np.uint64(0xEFC60000)
    return value ^ (value >> np.uint64(18))


@njit(cache=True)
def uniform(mt):
    """`random.random()`: 53 random bits in [0, 1)."""
    high = word(mt) >> np.uint64(5)
    low = word(mt) >> np.uint64(6)
    return (np.float64(high) * 67108864.0 + np.float64(low)) / 9007199254740992.0


@njit(cache=True)
def below(mt, n):
    """A whole number in [0, n), as `random.choice` and `random.randrange` draw it (rejection on the top bits)."""
    bits = 0
    while (n >> bits) > 0:
        bits += 1
    value = np.int64(word(mt) >> np.uint64(32 - bits))
    while value >= n:
        value = np.int64(word(mt) >> np.uint64(32 - bits))
    return value
