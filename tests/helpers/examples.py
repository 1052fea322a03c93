"""How many examples hypothesis tries."""

from hypothesis import settings


def num_examples(count: int) -> int:
    """Return `count`, or as many times that as the profile in use has of the usual examples."""
    return count * settings().max_examples // 100
