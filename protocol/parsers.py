"""List the names of the parsers of tool calls and of thoughts.

A worker's settings name a parser, the worker's card carries the name, and frontends have the parser.
"""

from collections.abc import Mapping

from kvmesh.protocol.errors import ConfigError

NONE = "none"  # leave the text as it is
HARMONY = "harmony"  # thoughts, calls and prose in channels: one parser for all of them

TOOL_PARSERS = (
    "deepseek_v3",
    "glm45",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "mistral",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
)
REASONING_PARSERS = (
    "deepseek_r1",
    "glm45",
    "granite",
    "kimi",
    "kimi_k2",
    "mistral",
    "nemotron",
    "qwen3",
    "seed_oss",
    "step3",
    "think",
)
_HARMONY_ALIASES = {"gpt_oss": HARMONY}
_TOOL_ALIASES = {
    **_HARMONY_ALIASES,
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "deepseek_r1": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v3",
    "llama4_pythonic": "pythonic",
    "lfm2": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "glm46": "glm45",
    "glm47": "glm45",
}
_REASONING_ALIASES = {
    **_HARMONY_ALIASES,
    "deepseek_v3": "think",
    "deepseek_v31": "think",
    "glm47": "glm45",
    "kimi_k25": "kimi_k2",
    "magistral": "mistral",
    "nemotron_3": "nemotron",
    "nemotron_v3": "nemotron",
    "qwen3_thinking": "qwen3",
    "qwq": "qwen3",
    "step3p5": "step3",
}

TOOL_PARSER_HELP = f"how the model writes tool calls: {', '.join(TOOL_PARSERS)}, {HARMONY}, {NONE}; default: guessed"
REASONING_PARSER_HELP = (
    f"how the model sets its thoughts apart: {', '.join(REASONING_PARSERS)}, {HARMONY}, {NONE}; default: guessed"
)


def tool_parser_name(name: str) -> str:
    """Return the parser's own name for `name`, which may be another server's; "" stays "".

    Raise ConfigError, which lists the names, if there is no such parser.
    """
    return _known(name, TOOL_PARSERS, _TOOL_ALIASES, "tool parser")


def reasoning_parser_name(name: str) -> str:
    """Return the name of a parser of thoughts, as `tool_parser_name` does for tool calls."""
    return _known(name, REASONING_PARSERS, _REASONING_ALIASES, "reasoning parser")


def _known(name: str, names: tuple[str, ...], aliases: Mapping[str, str], kind: str) -> str:
    key = name.lower().replace("-", "_")
    key = aliases.get(key, key)
    if key and key not in (*names, HARMONY, NONE):
        raise ConfigError(
            f"no {kind} is named {name!r}",
            hint=f"use one of {', '.join(sorted([*names, HARMONY, *aliases]))}, or {NONE}",
        )
    return key
