"""Make the ids of items. An id names the response of its item, so that a reference finds the item without an index."""

_RESPONSE = "resp_"


def output_id(kind: str, response_id: str, place: int) -> str:
    """Return the id of an output item; `kind` is msg, rs or fc, `place` counts the response's output items."""
    return f"{kind}_{response_id.removeprefix(_RESPONSE)}_{place}"


def input_id(kind: str, response_id: str, place: int) -> str:
    """Return the id of an input item that has none; `place` counts the input items of the request."""
    return f"{kind}_{response_id.removeprefix(_RESPONSE)}_i{place}"


def response_of(item_id: str) -> str | None:
    """Return the id of the response that an item belongs to; None if the item's id was not made here."""
    middle = item_id.partition("_")[2].rpartition("_")[0]
    return _RESPONSE + middle if middle else None
