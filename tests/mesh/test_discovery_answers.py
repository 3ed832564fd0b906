"""Test which keys count under static discovery: answers and the time go in, keys come out."""

import re

import pytest

from kvmesh.mesh.discovery.answers import (
    FIRST_RETRY_S,
    FOREIGN_RETRY_S,
    LEASE_S,
    LONGEST_FOREIGN_RETRY_S,
    LONGEST_RETRY_S,
    MAX_ADDRESSES,
    MAX_LIST_BYTES,
    NOT_ASKED,
    Answers,
    read_addresses,
)
from kvmesh.protocol.errors import ConfigError, WireError

A, B = "10.0.0.1:7000", "10.0.0.2:7000"
ONE, TWO = {"workers/1": b"1"}, {"workers/2": b"2"}


@pytest.fixture
def answers() -> Answers:
    found = Answers()
    found.on_addresses([A, B])
    return found


def test_the_keys_of_all_addresses_are_present(answers: Answers) -> None:
    answers.on_news(A, 1, ONE, 0.0)
    answers.on_news(B, 2, TWO, 0.0)
    assert answers.present() == ONE | TWO
    assert (answers.num_answering, answers.is_all_silent) == (2, False)


def test_a_key_that_its_owner_shows_no_longer_is_withdrawn(answers: Answers) -> None:
    answers.on_news(A, 1, ONE | TWO, 0.0)
    answers.on_news(A, 1, TWO, 1.0)
    assert (answers.present(), answers.lapsed()) == (TWO, frozenset())


def test_another_process_at_an_address_ends_the_keys_of_the_one_before(answers: Answers) -> None:
    answers.on_news(A, 1, ONE, 0.0)
    answers.on_news(A, 2, TWO, 1.0)
    assert (answers.present(), answers.lapsed()) == (TWO, frozenset())


def test_a_silent_address_keeps_its_keys_for_a_lease(answers: Answers) -> None:
    answers.on_news(A, 1, ONE, 5.0)
    answers.on_silence(A, "reset", 6.0)
    answers.on_silence(B, "no answer", 5.0 + LEASE_S - 0.1)
    assert answers.present() == ONE
    answers.on_silence(B, "no answer", 5.0 + LEASE_S)
    assert (answers.present(), answers.lapsed()) == ({}, {"workers/1"})


def test_a_silence_of_a_lease_that_ends_in_time_changes_nothing(answers: Answers) -> None:
    answers.on_news(A, 1, ONE, 0.0)
    answers.on_silence(A, "reset", 6.0)
    answers.on_news(A, 1, ONE, 7.0)
    answers.on_time(7.0 + 10 * LEASE_S)
    assert (answers.present(), answers.num_answering) == (ONE, 1)


def test_keys_lapse_at_once_where_nothing_listens(answers: Answers) -> None:
    answers.on_news(A, 1, ONE, 0.0)
    answers.on_silence(A, "refused", 1.0, is_gone=True)
    assert (answers.present(), answers.lapsed()) == ({}, {"workers/1"})


def test_an_address_that_answers_again_shows_its_keys_again(answers: Answers) -> None:
    answers.on_news(A, 1, ONE, 0.0)
    answers.on_silence(A, "refused", 1.0, is_gone=True)
    answers.on_news(A, 1, ONE, 2.0)
    assert (answers.present(), answers.lapsed()) == (ONE, frozenset())


@pytest.mark.parametrize("how", ["withdrawn", "gone", "unlisted"])
def test_a_key_counts_while_another_address_shows_it(answers: Answers, how: str) -> None:
    """One process may be listed by name and by number, and several workers of a process show the same keys."""
    answers.on_news(A, 1, ONE, 0.0)
    answers.on_news(B, 1, ONE, 0.0)
    match how:
        case "withdrawn":
            answers.on_news(A, 1, {}, 1.0)
        case "gone":
            answers.on_silence(A, "refused", 1.0, is_gone=True)
        case _:
            answers.on_addresses([B])
    assert answers.present() == ONE


def test_the_keys_of_an_address_that_leaves_the_list_are_withdrawn(answers: Answers) -> None:
    answers.on_news(A, 1, ONE, 0.0)
    answers.on_addresses([B])
    assert (answers.present(), answers.lapsed()) == ({}, frozenset())


def test_own_keys_count_without_an_answer(answers: Answers) -> None:
    answers.on_own("routers/r", b"me")
    answers.on_news(A, 1, {"routers/r": b"me"}, 0.0)
    answers.on_addresses([B])
    assert answers.present() == {"routers/r": b"me"}
    answers.on_own("routers/r", b"")
    assert answers.present() == {}


def test_keys_cannot_be_as_they_were_at_another_process(answers: Answers) -> None:
    answers.on_news(A, 1, ONE, 0.0)
    answers.on_news(A, 1, None, 3.0)
    with pytest.raises(WireError, match="does not say which keys it shows"):
        answers.on_news(A, 2, None, 6.0)
    assert answers.present() == ONE


def test_what_each_address_said_is_told_with_the_silent_ones_first(answers: Answers) -> None:
    assert answers.said() == ((A, NOT_ASKED), (B, NOT_ASKED))
    answers.on_news(A, 1, ONE, 0.0)
    answers.on_silence(B, "x" * 1000, 0.0)
    assert answers.said() == ((B, "x" * 200), (A, "answers and shows 1 key"))


def test_an_address_is_asked_more_rarely_the_longer_it_is_silent(answers: Answers) -> None:
    answers.on_silence(A, "refused", 0.0)
    waits = [answers.retry_s(A, silent_s) for silent_s in (0.0, 1.0, 10.0, 1000.0)]
    assert waits == [FIRST_RETRY_S, FIRST_RETRY_S, 1.0, LONGEST_RETRY_S]
    foreign = [answers.retry_s(A, silent_s, is_foreign=True) for silent_s in (0.0, 10.0, 1000.0)]
    assert foreign == [FOREIGN_RETRY_S, 5.0, LONGEST_FOREIGN_RETRY_S]


def test_a_list_has_one_address_in_a_line() -> None:
    text = b"# workers\n10.0.0.1:7000  # the first\n\n  gpu-2.site:7001\r\n[fe80::1%eth0]:7000\n10.0.0.1:7000\n"
    assert read_addresses(text, "f") == ["10.0.0.1:7000", "gpu-2.site:7001", "[fe80::1%eth0]:7000"]


@pytest.mark.parametrize(
    "line",
    [
        "10.0.0.1",
        ":7000",
        "host:",
        "host:0",
        "host:65536",
        "host:http",
        "a b:1",
        "http://a:1",
        "fe80::1:7000",
        "\xff:1",
    ],
)
def test_a_line_that_is_no_address_is_named_by_its_number(line: str) -> None:
    with pytest.raises(ConfigError, match=r"mesh.txt, line 3: .* is no address; write host:port"):
        read_addresses(f"10.0.0.1:7000\n\n{line}\n".encode("latin-1"), "mesh.txt")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"# nothing\n", "lists no address"),
        (b"#" * (MAX_LIST_BYTES + 1), f"has {MAX_LIST_BYTES + 1} bytes"),
        (b"".join(b"h:%d\n" % port for port in range(1, MAX_ADDRESSES + 2)), f"lists {MAX_ADDRESSES + 1} addresses"),
    ],
)
def test_a_list_without_end_or_contents_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read_addresses(data, "mesh.txt")
