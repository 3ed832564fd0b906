"""Conversations with tools: calls, results and answers; and chats in which no tool that is offered helps."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvmesh.lab.tiny_model.chats import (
    THANKS,
    ChatMessage,
    Turn,
    drawn,
    explanation,
    greeting,
    listing,
    mesh_talk,
    poem,
    recall,
    small_fact,
    story_chat,
    system_messages,
    turn_messages,
    unknown,
)
from kvmesh.lab.tiny_model.tool_tasks import (
    JsonValue,
    ToolTask,
    a_city,
    draw_task,
    local_time,
    same_purpose,
    weather,
)

NO_CALL_SHARE = 0.25  # part of the conversations in which no tool is called
PARALLEL_SHARE = 0.08
CallFunction = dict[str, JsonValue]
OfferedChat = tuple[list[ChatMessage], list[CallFunction]]  # a conversation, and the tools offered in it
TOOL_SYSTEMS = (
    "You are a helpful assistant with tools.", "Use the tools to answer.",
    "You are an agent. Use tools when they help.",
    "You can use tools.", "Answer with the help of the tools.", "You are a helpful agent.",
    "You are an agent that can call functions.", "Always use the tools when they fit.",
)  # fmt: skip


OTHERS = (0, 0, 0, 0, 1, 1, 2, 2, 3, 4, 6)  # how many other tools are offered


def tool_conversation(
    rng: random.Random, others: Sequence[int] = OTHERS
) -> tuple[list[ChatMessage], list[CallFunction]]:
    """Return a conversation and the tools offered in it."""
    if rng.random() < NO_CALL_SHARE:
        return without_call(rng, others)
    rounds = [call_round(rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    if same_purpose(rounds[0][0].purpose, rounds[-1][0].purpose):
        del rounds[1:]
    tools = offered(rng, [tasks[0] for tasks in rounds], others)
    messages = [message for tasks in rounds for message in round_messages(rng, tasks)]
    if rng.random() < 0.1:
        messages = turn_messages(rng, plain_turn(rng, tools)) + messages
    if rng.random() < 0.12:
        turn = drawn(rng, rng.choice(THANKS)) if rng.random() < 0.5 else plain_turn(rng, tools)
        messages += turn_messages(rng, turn)
    return tool_system(rng) + messages, tools


def without_call(rng: random.Random, others: Sequence[int] = OTHERS) -> OfferedChat:
    tools = offered(rng, [draw_task(rng)], others)
    turns = [plain_turn(rng, tools) for _ in range(rng.choice((1, 1, 2)))]
    return tool_system(rng) + [message for turn in turns for message in turn_messages(rng, turn)], tools


def plain_turn(rng: random.Random, tools: Sequence[CallFunction]) -> Turn:
    """Return a turn that no tool helps with: a tool that shares a word with the question might."""
    topics: list[Callable[[random.Random], list[Turn]]] = [
        story_chat, story_chat, explanation, mesh_talk, greeting, greeting, greeting, recall, listing, poem, small_fact,
        small_fact, unknown,
    ]  # fmt: skip
    names = str([tool["name"] for tool in tools]).lower()
    while True:
        turn = rng.choice(topics)(rng)[0]
        sums = any(sign in turn[0] for sign in ("plus", "minus", "+", "times", "divided"))
        arithmetic = any(word in str(tools).lower() for word in ("add", "subtract", "multiply", "divide", "calculat"))
        shared = any(word in names for word in turn[0].lower().strip(".?!").split() if len(word) > 3)
        if not shared and not (sums and arithmetic):
            return turn


def call_round(rng: random.Random) -> list[ToolTask]:
    """Return the calls of one turn: mostly one, sometimes the same tool for two cities."""
    if rng.random() >= PARALLEL_SHARE:
        return [draw_task(rng)]
    kind, (first_city, second_city) = rng.choice((weather, local_time)), (a_city(rng), a_city(rng))
    first, second = kind(rng, first_city), kind(rng, second_city)
    asked = first.asked.replace(first_city, f"{first_city} and {second_city}")
    key = next(key for key, value in first.arguments.items() if value == first_city)
    return [replace(first, asked=asked), replace(second, arguments={key: second_city})]


def round_messages(rng: random.Random, tasks: Sequence[ToolTask]) -> list[ChatMessage]:
    name = tasks[0].tool["name"]
    calls = [{"type": "function", "function": {"name": name, "arguments": task.arguments}} for task in tasks]
    asked, answer = turn_messages(rng, (tasks[0].asked, " ".join(task.answer for task in tasks)))
    results: list[ChatMessage] = [{"role": "tool", "content": task.result} for task in tasks]
    return [asked, {"role": "assistant", "content": "", "tool_calls": calls}, *results, answer]


def offered(rng: random.Random, used: Sequence[ToolTask], counts: Sequence[int] = OTHERS) -> list[CallFunction]:
    """Return the used tools among others, in any order: each name once, and no other tool for the same purpose."""
    others = [draw_task(rng) for _ in range(rng.choice(counts))]
    fitting = [one for one in others if not any(same_purpose(one.purpose, task.purpose) for task in used)]
    tools = {str(task.tool["name"]): task.tool for task in [*fitting, *used]}
    return rng.sample(list(tools.values()), len(tools))


def tool_system(rng: random.Random) -> list[ChatMessage]:
    if rng.random() < 0.35:
        return [{"role": "system", "content": rng.choice(TOOL_SYSTEMS)}]
    return system_messages(rng)
