"""How far the time model may be off: every shape, and their means."""

from __future__ import annotations

BOUND = 0.25  # of one shape
MEAN = 0.08  # of the sizes of the errors
SIGNED_MEAN = 0.04  # of the errors, either way: the model is neither too fast nor too slow


def check_errors(errors: dict[str, float]) -> None:
    """Every shape within the bound; the message lists all errors."""
    assert errors
    assert all(abs(error) <= BOUND for error in errors.values()), _text(errors)


def check_means(errors: dict[str, float]) -> None:
    """Both means within their bounds; the message lists them and all errors."""
    mean = sum(map(abs, errors.values())) / len(errors)
    signed = sum(errors.values()) / len(errors)
    text = f"mean {mean:.1%}, signed {signed:+.1%}\n{_text(errors)}"
    assert mean <= MEAN and abs(signed) <= SIGNED_MEAN, text


def _text(errors: dict[str, float]) -> str:
    return "model errors:\n" + "\n".join(f"{error:+.1%} {name}" for name, error in errors.items())
