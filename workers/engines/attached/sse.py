"""Server-sent events: bytes in, the data of whole events out. Pure."""

from kvmesh.protocol.errors import WireError

MAX_EVENT_BYTES = 16 << 20  # a server may repeat the prompt in its first event: 1 M tokens are some 7 MB


class SseReader:
    """Takes the body of a `text/event-stream` in pieces of any size."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = b""  # of a line that has not ended
        self._data: list[bytes] = []  # of an event that has not ended
        self._event_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that end in `piece`, in order. Raises WireError for one that is too large."""
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = self._rest + lines[0]
            self._rest = rest
        else:
            self._rest += rest
        events = [data for line in lines if (data := self._on_line(line)) is not None]
        self._check_size(len(self._rest))
        return events

    def _on_line(self, line: bytes) -> bytes | None:
        """The event that this line ends."""
        line = line.removesuffix(b"\r")
        self._check_size(len(line))
        if line.startswith(b"data:"):
            data = line[5:].removeprefix(b" ")
            self._data.append(data)
            self._event_bytes += len(data) + 1
        elif not line and self._data:
            event = b"\n".join(self._data)
            self._data, self._event_bytes = [], 0
            return event
        return None

    def _check_size(self, more_bytes: int) -> None:
        if self._event_bytes + more_bytes > self._max_event_bytes:
            raise WireError(
                f"the server sent an event of more than {self._max_event_bytes} bytes",
                hint="is there an OpenAI-compatible server behind this URL?",
            )
