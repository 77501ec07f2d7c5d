"""Seeded inputs that are the same on every machine and with every library version."""

from __future__ import annotations

import zlib

import numpy as np

# Words of float32 that rounding, comparing and flushing treat specially.
FLOATS = [
    0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
    0x7F800001, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,
    0x3FC00000, 0x4B800001, 0x33800000, 0xC0490FDB,
]  # fmt: skip


def random_words(seed: str, count: int) -> np.ndarray:
    """`count` random uint32 (splitmix64 of a counter)."""
    with np.errstate(over="ignore"):
        start = np.uint64(zlib.crc32(seed.encode())) << np.uint64(32)
        x = (start + np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(16)).astype(np.uint32)


def random_bytes(seed: str, count: int) -> np.ndarray:
    """`count` random bytes."""
    return random_words(seed, -(-count // 4)).view(np.uint8)[:count]


def uniform(seed: str, count: int, low: float, high: float) -> np.ndarray:
    """`count` float32 between low and high."""
    unit = random_words(seed, count).astype(np.float64) / 2**32
    return (low + (high - low) * unit).astype(np.float32)


def small_integers(seed: str, count: int, limit: int) -> np.ndarray:
    """`count` int64 between -limit and limit."""
    return (random_words(seed, count) % np.uint32(2 * limit + 1)).astype(np.int64) - limit


def crossed(specials: list[int], rest: np.ndarray, seed: str) -> tuple[np.ndarray, ...]:
    """Three operand arrays: every pair of special words (the third cycles), then `rest` [3, n]."""
    s = np.array(specials, np.uint32)
    first, second = np.repeat(s, len(s)), np.tile(s, len(s))
    third = s[random_words(seed, len(first)) % np.uint32(len(s))]
    return tuple(np.concatenate(pair) for pair in zip((first, second, third), rest))
