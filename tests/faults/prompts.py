"""Prompts of the fault tests."""

LENGTHS = [1, 15, 16, 17, 33, 64, 100, 300]  # tokens; blocks have 16


def prompt_of(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 1900 + 10 for i in range(length)]
