"""Run tasks of lm-evaluation-harness on a mesh, and compare its scores with the model computed here, in numpy."""

import json
import os
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from flows import KEY, MODEL, QUESTION, TOKENS, URL, Flows, asked, chat_text, check, equal
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

CHECKPOINT = Path(__file__).parents[3] / "cluster" / "tiny_model" / "checkpoint"
CLOSE = 1e-3  # of the logprob of each token
STORY = "Once upon a time there was a little fox who lived at the edge of the forest. "
CHOICES = [
    {"text": "Once upon a time there was a little", "choices": [" fox", " bear", " forest of stones"], "answer": 0},
    {"text": "The sun was warm and the sky was", "choices": [" blue", " green", " under the"], "answer": 0},
    {"text": "Grüße aus Köln: 東京", "choices": [" 🦊", "é", " and"], "answer": 2},
]
TEXTS = [STORY, STORY * 20, "Grüße aus Köln: naïve café, 東京 🦊", "a"]
PROMPTS = [QUESTION, "Once upon a time"]
TASKS = {
    "choices": {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
                "doc_to_target": "{{answer}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}]},
    "texts": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
              "metric_list": [{"metric": "byte_perplexity"}]},
    "prompts": {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "",
                "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": TOKENS, "temperature": 0},
                "metric_list": [{"metric": "bypass"}]},
}  # fmt: skip
DOCUMENTS = {
    "choices": CHOICES,
    "texts": [{"text": text} for text in TEXTS],
    "prompts": [{"text": prompt} for prompt in PROMPTS],
}

flows = Flows("lm_eval")
tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
os.environ["OPENAI_API_KEY"] = KEY


# --- the model in numpy: Qwen3 with tied embeddings ---------------------------------------------------


@cache
def weights():
    """Return the tensors of the checkpoint, which holds bfloat16, as float32."""
    data = (CHECKPOINT / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, at in json.loads(data[8:start]).items():
        if name != "__metadata__":
            equal(at["dtype"], "BF16", name)
            first, last = at["data_offsets"]
            halves = np.frombuffer(data[start + first : start + last], np.uint16).astype(np.uint32)
            found[name] = (halves << 16).view(np.float32).reshape(at["shape"])
    return found


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def logprobs_after(tokens):
    """Return the logprobs after each token: [len(tokens), vocab]."""
    config, w = json.loads((CHECKPOINT / "config.json").read_text()), weights()
    heads, kv_heads, size = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    eps, count = config["rms_norm_eps"], len(tokens)
    angles = np.outer(np.arange(count), config["rope_theta"] ** -(np.arange(0, size, 2) / size))
    cos, sin = (
        np.concatenate([part, part], -1)[:, None].astype(np.float32) for part in (np.cos(angles), np.sin(angles))
    )

    def rotated(x):
        left, right = np.split(x, 2, -1)
        return x * cos + np.concatenate([-right, left], -1) * sin

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        y = rms_norm(x, w[p + "input_layernorm.weight"], eps)
        q, k, v = ((y @ w[f"{p}self_attn.{n}_proj.weight"].T).reshape(count, -1, size) for n in ("q", "k", "v"))
        q, k = (rotated(rms_norm(a, w[f"{p}self_attn.{n}_norm.weight"], eps)) for n, a in (("q", q), ("k", k)))
        k, v = (np.repeat(a, heads // kv_heads, 1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size) + np.triu(np.full((count, count), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v).reshape(count, -1)
        x = x + mixed.astype(np.float32) @ w[p + "self_attn.o_proj.weight"].T
        y = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = y @ w[p + "mlp.gate_proj.weight"].T, y @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    logits = rms_norm(x, w["model.norm.weight"], eps) @ w["model.embed_tokens.weight"].T
    shifted = (logits - logits.max(-1, keepdims=True)).astype(np.float64)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def score(before, tokens):
    """Return the logprob of `tokens` after the tokens `before`, and whether they are the likeliest ones."""
    logprobs = logprobs_after([*before, *tokens])[len(before) - 1 : -1]
    return logprobs[np.arange(len(tokens)), tokens].sum(), logprobs.argmax(-1).tolist() == list(tokens)


# --- the harness --------------------------------------------------------------------------------------


def evaluated(name, model="local-completions", path="/v1/completions", **options):
    """Return what the harness got for each document of a task."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, f"{name}.jsonl")
        data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS[name]))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        Path(folder, f"{name}.json.yaml").write_text(json.dumps({"task": name, **source, **TASKS[name]}))
        given = {
            "base_url": URL + path,
            "model": MODEL,
            "tokenizer": str(CHECKPOINT),
            "tokenizer_backend": "huggingface",
        }
        result = simple_evaluate(
            model=model,
            model_args={**given, "max_length": 2048, **options},
            tasks=[name],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            apply_chat_template=model == "local-chat-completions",
            log_samples=True,
            bootstrap_iters=0,
        )
    return [sample["resps"] for sample in sorted(result["samples"][name], key=lambda sample: sample["doc_id"])]


def close(found, expected, tokens, what):
    check(abs(float(found) - expected) <= CLOSE * max(tokens, 1), f"{what}: found {found}, expected {expected}")


def check_choices(**options):
    for document, answers in zip(CHOICES, evaluated("choices", **options), strict=True):
        before = tokenizer.encode(document["text"])
        for choice, [[logprob, is_greedy]] in zip(document["choices"], answers, strict=True):
            tokens = tokenizer.encode(document["text"] + choice)[len(before) :]
            expected, likeliest = score(before, tokens)
            close(logprob, expected, len(tokens), choice)
            equal(str(is_greedy), str(likeliest), f"whether {choice!r} is the likeliest")


@flows.flow
def chat():
    answers = evaluated("prompts", "local-chat-completions", "/v1/chat/completions")
    equal([text for [[text]] in answers], [chat_text(prompt) for prompt in PROMPTS], "the answers")


@flows.flow
def completions():
    body = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0}
    expected = [asked("/v1/completions", {**body, "prompt": prompt})["choices"][0]["text"] for prompt in PROMPTS]
    equal([text for [[text]] in evaluated("prompts", num_concurrent=2)], expected, "the answers")


@flows.flow
def loglikelihood():
    check_choices()


@flows.flow
def loglikelihood_in_batches():
    check_choices(batch_size=4, num_concurrent=4)


@flows.flow
def loglikelihood_of_texts():
    check_choices(tokenized_requests=False)


@flows.flow
def rolling():
    for text, [[logprob]] in zip(TEXTS, evaluated("texts"), strict=True):
        tokens = tokenizer.encode(text)
        expected, _ = score([tokenizer.eos_token_id], tokens)
        close(logprob, expected, len(tokens), text[:40])


flows.lacks(
    "it scores and continues texts, one request at a time",
    "stream", "second_turn", "tools", "structured", "usage", "error", "cancel",
)  # fmt: skip
flows.run()
