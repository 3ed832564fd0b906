"""The loop of tools in Anthropic's client works: its request for a thread is refused in the way the client expects."""

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool, beta_tool
from anthropic.types.beta import BetaMessage

from tests.frontend.anthropic.serving import ASKED, Served, calling, put_together, words

ASKING: dict[str, Any] = ASKED | {"messages": [{"role": "user", "content": "how is it in Ulm?"}]}


@beta_tool
def weather(city: str) -> str:
    """Report the weather of a city."""
    return f"rain in {city}"


@beta_async_tool
async def async_weather(city: str) -> str:
    """Report the weather of a city."""
    return f"rain in {city}"


def play_a_call(served: Served, name: str) -> None:
    served.generator.scripts = [words("I look.", calling("Ulm", name)), words("It rains.")]


def run_whole(client: anthropic.Anthropic) -> BetaMessage:
    return client.beta.messages.tool_runner(**ASKING, tools=[weather]).until_done()


def run_streamed(client: anthropic.Anthropic) -> BetaMessage:
    messages = []
    for stream in client.beta.messages.tool_runner(**ASKING, tools=[weather], stream=True):
        assert {event.type for event in stream} >= {"message_start", "message_delta"}
        messages.append(stream.get_final_message())
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    return messages[-1]


@pytest.mark.parametrize("run", [run_whole, run_streamed])
async def test_the_sync_tool_runner_runs_to_its_end(
    served: Served, run: Callable[[anthropic.Anthropic], BetaMessage]
) -> None:
    play_a_call(served, "weather")
    with served.sync_client() as client:
        final = await asyncio.to_thread(run, client)
    assert final.content[0].type == "text"
    assert final.content[0].text == "It rains."
    assert "<|im_start|>tool\nrain in Ulm<|im_end|>" in served.prompt()
    assert len(served.generator.requests) == 2, "the request with the thread asked no worker"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_async_tool_runner_runs_to_its_end(served: Served, stream: bool) -> None:
    play_a_call(served, "async_weather")
    async with served.client() as client:
        if stream:
            async for turn in client.beta.messages.tool_runner(**ASKING, tools=[async_weather], stream=True):
                final = await turn.get_final_message()
        else:
            final = await client.beta.messages.tool_runner(**ASKING, tools=[async_weather]).until_done()
    assert final.content[0].type == "text"
    assert final.content[0].text == "It rains."
    assert "<|im_start|>tool\nrain in Ulm<|im_end|>" in served.prompt()


async def test_a_thread_of_the_client_goes_on_without_one(served: Served) -> None:
    async with served.client() as client:
        thread = client.beta.messages.thread(
            model="tiny", max_tokens=100, unsupported_request_behavior="continue_unthreaded"
        )
        await thread.send({"role": "user", "content": "one"})
        await thread.send({"role": "user", "content": "two"})
    assert "one<|im_end|>" in served.prompt()
    assert "two<|im_end|>" in served.prompt()


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}], ids=str)
async def test_the_error_says_that_threads_are_unsupported(served: Served, thread: dict[str, Any]) -> None:
    messages = [] if thread["type"] == "continue" else ASKED["messages"]
    for stream in (False, True):
        asked = ASKED | {"thread": thread, "messages": messages, "stream": stream}
        status, _, body = await served.post(asked, "/v1/messages?beta=true")
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}
        assert "thread" in body["error"]["message"]
    no_thread = await served.events(ASKED | {"thread": None})
    assert put_together(no_thread)["stop_reason"] == "end_turn"
