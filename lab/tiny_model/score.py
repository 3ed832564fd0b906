"""Score a checkpoint on new documents: `python -m kvmesh.lab.tiny_model.score [--folder DIR] [--count N]`.

It prints the loss on prose, and how often greedy answers to random tasks call the right tool, use its result, or stay
prose where no tool helps. Names of tools and values are drawn as in training, and nearly all of them are new.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.lab.tiny_model.chats import ChatMessage
from kvmesh.lab.tiny_model.corpus import TURN_END, prose_document, render
from kvmesh.lab.tiny_model.tool_chats import offered, tool_system, without_call
from kvmesh.lab.tiny_model.tool_tasks import ToolTask, draw_task

SEED = 990_017  # not that of the training
MAX_ANSWER_TOKENS = 120


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvmesh.lab.tiny_model.score", description="Score the tiny model.")
    parser.add_argument("--folder", type=Path, default=CHECKPOINT_DIR, help="folder of the checkpoint")
    parser.add_argument("--count", type=int, default=100, help="tasks of each kind")
    flags = parser.parse_args()
    for name, value in scores(flags.folder, flags.count).items():
        print(f"{name}: {value:.3f}")


def scores(folder: Path, count: int) -> dict[str, float]:
    """Return the loss on prose [nats per token] and the shares of tasks that were done."""
    scored = GreedyModel(folder)
    found = {"loss on prose": scored.prose_loss(count)}
    rng = random.Random(SEED)
    done: dict[str, int] = {}
    for _ in range(count):
        for name, is_right in scored.task(rng, draw_task(rng)).items():
            done[name] = done.get(name, 0) + is_right
    return found | {name: right / count for name, right in done.items()}


class GreedyModel:
    """A loaded checkpoint that answers greedily."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()

    @torch.inference_mode()
    def prose_loss(self, count: int) -> float:
        rng, nats, tokens = random.Random(SEED), 0.0, 0
        for _ in range(count):
            ids = self._tokenizer(prose_document(rng), return_tensors="pt").input_ids
            nats += float(self._model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
            tokens += ids.shape[1] - 1
        return nats / tokens

    def task(self, rng: random.Random, task: ToolTask) -> dict[str, bool]:
        """Return which parts of one task are right."""
        tools = offered(rng, [task])
        asked: list[ChatMessage] = [*tool_system(rng), {"role": "user", "content": task.asked}]
        name, arguments = call_in(self._answer(asked, tools))
        call = {"type": "function", "function": {"name": task.tool["name"], "arguments": task.arguments}}
        asked += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": task.result}]
        answer = self._answer(asked, tools)
        chat, others = without_call(rng)
        question = next(place for place, message in enumerate(chat) if message["role"] == "user")
        return {
            "the right tool is called": name == task.tool["name"],
            "with the right names of arguments": name == task.tool["name"]
            and arguments.keys() == task.arguments.keys(),
            "with the right arguments": name == task.tool["name"] and arguments == task.arguments,
            "the answer has the result": task.answer.split()[-1].strip(".") in answer,
            "no call where no tool helps": "<tool_call>" not in self._answer(chat[: question + 1], others),
        }

    @torch.inference_mode()
    def _answer(self, messages: list[ChatMessage], tools: list[Any]) -> str:
        prompt = render(messages, tools) + "<|im_start|>assistant\n"
        inputs = self._tokenizer(prompt, return_tensors="pt")
        output = self._model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        text: str = self._tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
        return text.partition(TURN_END)[0]


def call_in(answer: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of the first call, empty if there is none."""
    text = answer.partition("<tool_call>")[2].partition("</tool_call>")[0]
    try:
        call = json.loads(text)
        return call["name"], call["arguments"]
    except (ValueError, KeyError, TypeError):
        return "", {}


if __name__ == "__main__":
    main()
