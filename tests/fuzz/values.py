"""Values that nobody meant: of every JSON type, at the edges of every range."""

from __future__ import annotations

import random
from typing import Any

from dsv4.quoting import LINE

# Values that no message may repeat whole; the first ones JSON can hold.
LONG_JSON = (
    *("x" * 10_000, "\x1b[31m\n" * 3000, "界" * 10_000, "[/]" * 3000),
    *([[["y" * 200] * 9] * 9] * 9, [1] * 5000, {str(i): i for i in range(3000)}),
)
LONG = (*LONG_JSON, b"x" * 10_000, (1,) * 5000, 10**5000, [-(10**5000)])


def assert_one_line(message: str) -> None:
    """A message repeats foreign values, so it must be printable and short whatever they are."""
    assert message.isprintable() and len(message) <= LINE, message[: 2 * LINE]


HOSTILE: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    -1,
    7,
    64,
    127,
    128,
    129,
    4096,
    65_537,
    10**7,
    2**31 - 1,
    2**31,
    2**63,
    2**64,
    10**400,
    0.0,
    -0.0,
    0.5,
    1.0,
    1e-300,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    "1",
    "fp8",
    "a\nb\x1b[31m",
    *LONG_JSON,
    [],
    [[]],
    [0],
    [4, 128],
    [None],
    ["sliding_attention"],
    {},
    {"a": {}},
    {"type": "yarn"},
]


def any_value(dice: random.Random, depth: int = 0) -> Any:
    """A hostile value, or a short list or object of some."""
    kind = dice.randrange(10)
    if kind == 0 and depth < 3:
        return [any_value(dice, depth + 1) for _ in range(dice.randrange(4))]
    if kind == 1 and depth < 3:
        return {str(i): any_value(dice, depth + 1) for i in range(dice.randrange(3))}
    if kind == 2:
        return dice.randrange(-10, 10_000)
    return dice.choice(HOSTILE)


def mutated(dice: random.Random, data: dict[str, Any]) -> dict[str, Any]:
    """A copy of a JSON object with a few keys changed, removed or moved, nested ones included."""
    copy = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        target = copy
        nested = [value for value in copy.values() if isinstance(value, dict) and value]
        if nested and dice.random() < 0.3:
            target = dice.choice(nested)
        key = dice.choice(list(target)) if target else "a"
        action = dice.randrange(6)
        if action == 0:
            target.pop(key, None)
        elif action == 1 and isinstance(target.get(key), list) and target[key]:
            items = list(target[key])
            items[dice.randrange(len(items))] = any_value(dice)
            target[key] = items
        elif action == 2 and isinstance(target.get(key), int):
            target[key] = target[key] + dice.choice((-1, 1, 2)) * dice.choice((1, 64, 128))
        else:
            target[key] = any_value(dice)
    return copy
