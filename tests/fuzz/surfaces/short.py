"""Check that a refusal is short, whatever was refused."""


def must_be_short(error: Exception, most_chars: int) -> None:
    assert len(str(error)) <= most_chars, str(error)[:1000]
