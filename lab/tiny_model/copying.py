# ruff: noqa: E501 - a sentence with all its choices stays on one line
"""Exercises in copying: made-up words to repeat, and values to look up.

Calls of tools are copied from the prompt. A model learns to copy sooner where nearly every token is a copy.
"""

import random

from kvmesh.lab.tiny_model.chats import Turn
from kvmesh.lab.tiny_model.grammar import expand
from kvmesh.lab.tiny_model.tool_tasks import a_city, a_name, a_path, a_word, an_id, compact, made_up_word, styled


def copying_turn(rng: random.Random) -> Turn:
    return rng.choice((repeated, repeated, looked_up_value, named_value))(rng)


def repeated(rng: random.Random) -> Turn:
    text = pieces(rng, rng.randint(2, 14))
    ask = "{Repeat this:|Repeat after me:|Say this again:|Write this again:|Copy this:|Echo:|Say}"
    return f"{expand(rng, ask)} {text}", text


def pieces(rng: random.Random, count: int) -> str:
    """Return words, names, ids and paths in a row."""
    made = [rng.choice((made_up_word, made_up_word, a_word, a_name, an_id, a_path, a_city))(rng) for _ in range(count)]
    return rng.choice((" ", " ", ", ", "_", '","', "\n")).join(made)


def looked_up_value(rng: random.Random) -> Turn:
    """Ask for one value of an object of JSON."""
    facts = draw_facts(rng)
    key = rng.choice(list(facts))
    if rng.random() < 0.3:
        return f"{compact(dict(facts))}\n\nRepeat it.", compact(dict(facts))
    return f"{compact(dict(facts))}\n\n{expand(rng, '{What is [k]?|Give me [k].|[k]?}', {'k': key})}", facts[key]


def named_value(rng: random.Random) -> Turn:
    """Ask for one value of a list in prose, as JSON or as a word."""
    facts = draw_facts(rng)
    key = rng.choice(list(facts))
    told = ", ".join(f"{name} is {value}" for name, value in facts.items())
    answer = compact({key: facts[key]}) if rng.random() < 0.5 else facts[key]
    return f"{told}. {'Give me ' + key + ' as JSON.' if answer[0] == '{' else 'What is ' + key + '?'}", answer


def draw_facts(rng: random.Random) -> dict[str, str]:
    names = [styled(rng, [made_up_word(rng) for _ in range(rng.choice((1, 1, 2)))]) for _ in range(rng.choice((1, 2, 3, 4)))]  # fmt: skip
    return {name: rng.choice((made_up_word, a_word, a_name, an_id))(rng) for name in names}
