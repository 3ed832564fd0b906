"""Test that errors cross the wire whole."""

import pytest

from kvmesh.protocol.errors import (
    ConfigError,
    InvalidRequestError,
    MeshError,
    NoWorkerError,
    OverloadedError,
    WireError,
    shown_error,
)
from kvmesh.protocol.messages import Failure, decode, encode, error_of, failure_of


def across(error: MeshError) -> MeshError:
    """Return the error as a peer rebuilds it."""
    return error_of(decode(encode(failure_of(error)), Failure))


@pytest.mark.parametrize(
    "error",
    [
        NoWorkerError("a"),
        ConfigError("b", hint="do this; and that"),
        InvalidRequestError("c", hint="send less", param="messages[0]"),
        OverloadedError("full", hint="add workers", retry_after_s=2.1),
    ],
    ids=lambda error: error.code,
)
def test_an_error_arrives_with_its_class_and_fields(error: MeshError) -> None:
    back = across(error)
    assert type(back) is type(error)
    assert (str(back), vars(back)) == (str(error), vars(error))


def test_the_text_has_message_hint_and_retry_time() -> None:
    assert str(OverloadedError("full", hint="add workers", retry_after_s=2.1)) == "full; add workers; retry after 3 s"
    assert str(OverloadedError("full", retry_after_s=0)) == "full; retry after 1 s"
    assert str(NoWorkerError("none")) == "none"


def test_a_message_is_not_parsed_for_a_retry_time() -> None:
    back = across(OverloadedError("full; retry after 9 s"))
    assert (back.message, back.retry_after_s) == ("full; retry after 9 s", None)


def test_an_unknown_code_becomes_a_plain_error() -> None:
    assert type(error_of(Failure(code="of-a-newer-version", message="d"))) is MeshError


def test_the_fields_of_a_peers_error_are_bounded() -> None:
    huge = "x" * 100_000
    error = error_of(Failure(code="overloaded", message=huge, hint=huge, param=huge))
    assert (len(error.message), len(error.hint), len(error.param or "")) == (16384, 16384, 256)
    for seconds in (-1, 0, 86_401, 1 << 62):
        assert error_of(Failure(code="overloaded", message="m", retry_after_s=seconds)).retry_after_s is None


@pytest.mark.parametrize("field", ["code", "message", "hint", "param", "retry_after_s"])
def test_a_field_of_an_error_has_its_type(field: str) -> None:
    with pytest.raises(WireError, match="Failure"):
        decode(encode({"code": "c", "message": "m", field: [1]}), Failure)


def test_foreign_texts_are_left_out_but_what_a_device_says() -> None:
    assert shown_error(ValueError("the prompt")) == "(a text of 10 characters is left out)"
    assert shown_error(RuntimeError("CUDA out of memory. Tried 2 GiB.\nthe rest")) == "CUDA out of memory. Tried 2 GiB."
