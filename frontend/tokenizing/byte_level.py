"""GPT-2's way to write bytes as printable characters."""


def _stand_ins() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF_CHAR = _stand_ins()
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def written(text: str) -> str:
    """Return `text` as a byte-level vocabulary writes it."""
    return "".join([CHAR_OF_BYTE[byte] for byte in text.encode()])


# By code points: a stand-in becomes the character of its byte in Latin-1, any other one that Latin-1 does not have.
_LATIN_1 = dict.fromkeys(range(256), 0x100) | {ord(char): byte for char, byte in BYTE_OF_CHAR.items()}


def token_bytes(token: str) -> bytes:
    """A token with any character that is no stand-in is meant literally (added tokens)."""
    try:
        return token.translate(_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
