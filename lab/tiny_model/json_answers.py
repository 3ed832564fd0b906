# ruff: noqa: E501 - a sentence with all its choices stays on one line
"""Answers in compact JSON: the shape a guide allows, with short values that end."""

import random

from kvmesh.lab.tiny_model import words
from kvmesh.lab.tiny_model.chats import ChatMessage, Turn, small_fact, turn_messages
from kvmesh.lab.tiny_model.grammar import and_list, expand
from kvmesh.lab.tiny_model.tool_tasks import (
    JsonValue,
    a_city,
    a_date,
    a_name,
    a_number,
    a_phrase,
    a_sentence,
    a_word,
    compact,
    made_up_word,
    styled,
)

JSON_SYSTEMS = ("Answer only with JSON.", "You answer in JSON.", "Reply with a JSON object.", "Output JSON only.")
_STRING_KEYS = [
    "name",
    "title",
    "city",
    "colour",
    "color",
    "kind",
    "animal",
    "food",
    "place",
    "friend",
    "weather",
    "season",
    "mood",
    "text",
    "label",
    "summary",
    "category",
    "answer",
]
_NUMBER_KEYS = ["age", "count", "year", "price", "size", "number", "level", "score", "id", "amount", "weight"]
_BOOLEAN_KEYS = ["happy", "open", "ready", "young", "valid", "new", "active"]


def json_conversation(rng: random.Random) -> list[ChatMessage]:
    """Return a chat of one or two turns that are answered in JSON."""
    if rng.random() < 0.15:
        question, answer = small_fact(rng)[0]
        turn = (question, compact({rng.choice(("answer", "text", "reply", "result")): answer}))
        return [{"role": "system", "content": rng.choice(JSON_SYSTEMS)}, *turn_messages(rng, turn)]
    turns = [rng.choice((described, described, extracted, listed))(rng) for _ in range(rng.choice((1, 1, 2)))]
    return [message for turn in turns for message in turn_messages(rng, turn)]


def bare_json(rng: random.Random) -> str:
    """Return JSON without a chat around it."""
    return compact(json_object(rng))


def described(rng: random.Random) -> Turn:
    what = rng.choice(("a person", f"a {rng.choice(words.ANIMALS)}", f"a {rng.choice(words.THINGS)}", "a city", "a book", "a friend", "an order", "a user", "a story", f"a {made_up_word(rng)}", "an object"))  # fmt: skip
    value = json_object(rng)
    keys = expand(rng, "{ with the keys | with | with these keys: }") + " " + and_list(list(value))
    ask = "{Give me|Write|Return|Make|Describe|Show me} [w] {as JSON|in JSON|as a JSON object}"
    asked = expand(rng, ask, {"w": what}) + (" " + keys.strip() if rng.random() < 0.6 else "")
    return asked + ".", compact(value)


def extracted(rng: random.Random) -> Turn:
    name, city, number, colour, kind = a_name(rng), a_city(rng), a_number(rng), rng.choice(words.COLOURS), a_word(rng)
    text = expand(
        rng,
        "{[n] is [x] years old and lives in [c].|[n] from [c] has [x] [k]s.|[n] has a [o] [k] and lives in [c].}",
        {"n": name, "x": str(number), "c": city, "k": kind, "o": colour},
    )
    facts: dict[str, JsonValue] = {"name": name}
    facts |= {key: value for key, value in (("age", number), ("city", city), ("colour", colour), ("thing", kind)) if str(value) in text and rng.random() < 0.8 and (key != "age" or "years" in text)}  # fmt: skip
    ask = expand(rng, "{Extract [k] as JSON|Return [k] as JSON|Give me [k] in JSON}", {"k": and_list(list(facts))})
    return rng.choice((f"{ask}: {text}", f"{text} {ask}.", f"{text}\n\n{ask}.")), compact(facts)


def listed(rng: random.Random) -> Turn:
    what, pool = rng.choice((("animals", words.ANIMALS), ("colours", words.COLOURS), ("foods", words.FOODS), ("things", words.THINGS), ("names", words.NAMES_SHE)))  # fmt: skip
    count = rng.randint(2, 5)
    items: list[JsonValue] = list(rng.sample(pool, count))
    ask = expand(
        rng, f"{{List|Name|Give me}} {{{count}|{words.NUMBERS[count]}}} {what} {{as JSON|in JSON|as a JSON array}}."
    )
    return ask, compact(items if rng.random() < 0.5 or "array" in ask else {what: items})


def json_object(rng: random.Random, depth: int = 0) -> dict[str, JsonValue]:
    keys = rng.sample([*_STRING_KEYS, *_NUMBER_KEYS, *_BOOLEAN_KEYS], rng.choice((1, 2, 2, 3, 4)))
    if rng.random() < 0.4:
        keys[rng.randrange(len(keys))] = styled(rng, [made_up_word(rng) for _ in range(rng.choice((1, 1, 2)))])
    value = {key: json_value(rng, key) for key in keys}
    if depth < 2 and rng.random() < 0.2:
        nested = json_object(rng, depth + 1)
        value[rng.choice(("owner", "address", "details", "data", "item", made_up_word(rng)))] = (
            nested if rng.random() < 0.7 else [nested, json_object(rng, 2)]
        )
    return value


def json_value(rng: random.Random, key: str) -> JsonValue:
    if key in _NUMBER_KEYS:
        return a_number(rng) if rng.random() < 0.85 else round(a_number(rng) / 8, 2)
    if key in _BOOLEAN_KEYS:
        return rng.random() < 0.5
    match key:
        case "name" | "friend":
            return a_name(rng)
        case "city" | "place":
            return a_city(rng)
        case "colour" | "color":
            return rng.choice(words.COLOURS)
        case "text" | "summary" | "answer":
            return a_sentence(rng)
        case "title":
            return a_phrase(rng)
    if key in _STRING_KEYS:
        return a_word(rng)
    return any_value(rng)


def any_value(rng: random.Random) -> JsonValue:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice((a_word, a_name, a_date, a_phrase))(rng)
    if kind < 0.7:
        return a_number(rng)
    if kind < 0.8:
        return rng.choice((True, False, None))
    numbers: list[JsonValue] = [a_number(rng) for _ in range(rng.choice((0, 1, 2, 3)))]
    texts: list[JsonValue] = [a_word(rng) for _ in range(rng.choice((1, 2, 3)))]
    return rng.choice((numbers, texts))
