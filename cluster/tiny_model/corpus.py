"""The training text: an endless, seeded stream of stories and chats, all of it made by this package.

The same seed gives the same documents, so a checkpoint can be made again from the repository alone.
"""

import random
from collections.abc import Iterator, Sequence

from cluster.tiny_model.chats import ChatMessage, conversation
from cluster.tiny_model.stories import draw_world, tell

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

_PLAIN_SHARE = 0.1  # part of the documents that are a story without a chat around it


def documents(seed: int) -> Iterator[str]:
    """Yield training documents without end: a story or a chat, closed by `END_OF_TEXT`."""
    rng = random.Random(seed)
    while True:
        yield document(rng) + END_OF_TEXT


def document(rng: random.Random) -> str:
    if rng.random() < _PLAIN_SHARE:
        return tell(rng, draw_world(rng), long=rng.random() < 0.4).text
    return render(conversation(rng))


def render(messages: Sequence[ChatMessage]) -> str:
    """Return the ChatML text of `messages`, as the checkpoint's chat template renders them."""
    return "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages)
