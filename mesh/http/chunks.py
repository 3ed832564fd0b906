"""Learn the size of a chunk before its bytes arrive: the parser does not report it. Pure."""

MAX_KEPT_BYTES = 64  # of a size line that arrives in pieces: the size stands first


class ChunkSizes:
    """Watch the chunks of one body after the other."""

    __slots__ = ("_begin_bytes", "_is_new", "_line")

    def __init__(self) -> None:
        self._line = b""  # beginning of a size line, from earlier input
        self._begin_bytes = 0  # of the body, before the chunk
        self._is_new = False  # the size of the chunk is not known yet

    def on_header(self, body_bytes: int) -> None:
        """Record the end of a size line, after `body_bytes` of the body."""
        self._is_new, self._begin_bytes = True, body_bytes

    def on_complete(self) -> None:
        self._is_new = False

    def announced_bytes(self, data: bytes | bytearray | memoryview, body_bytes: int) -> int:
        """Return how long a body becomes with the chunk that `data` opens and does not complete; otherwise 0.

        `data` is the input that the parser has just read, `body_bytes` the body after it.
        """
        if not self._is_new:
            line = self._line + bytes(data)
            self._line = line[line.rfind(b"\n") + 1 :][:MAX_KEPT_BYTES]
            return 0
        end = len(data) - (body_bytes - self._begin_bytes)
        lines = self._line + bytes(data[:end])
        self._line, self._is_new = b"", False
        size_line = lines[lines.rfind(b"\n", 0, -1) + 1 :]
        try:
            return self._begin_bytes + int(size_line.partition(b";")[0], 16) if size_line.endswith(b"\n") else 0
        except ValueError:  # a trailer, which the parser checks
            return 0
