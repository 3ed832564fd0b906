"""List the clients that `make test-clients` runs, in the order of the table in docs/api.md."""

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENTS = ROOT / ".venv-clients"
FLOWS = ("chat", "stream", "second_turn", "tools", "structured", "usage", "error", "cancel")
NODE = "node"


@dataclass(frozen=True, slots=True)
class Client:
    """A script for one client. `more`: flows beyond the eight that its script reports."""

    name: str
    environment: str  # of requirements/
    script: str
    arguments: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        program = "node" if self.environment == NODE else "python"
        return [str(self.bin / program), str(HERE / self.script), *self.arguments]

    @property
    def bin(self) -> Path:
        return ENVIRONMENTS / self.environment / "bin"


CLIENTS = (
    Client("openai-python chat", "sdks", "python/openai_chat.py", more=("completions", "embeddings", "models")),
    Client("openai-python responses", "sdks", "python/openai_responses.py"),
    Client("anthropic-python", "sdks", "python/anthropic_messages.py", more=("models", "tool_runner")),
    Client("LiteLLM openai", "litellm", "python/litellm_client.py", ("openai",)),
    Client("LiteLLM anthropic", "litellm", "python/litellm_client.py", ("anthropic",)),
    Client("langchain-openai chat", "sdks", "python/langchain_client.py", ("openai",)),
    Client("langchain-openai responses", "sdks", "python/langchain_client.py", ("openai-responses",)),
    Client("langchain-anthropic", "sdks", "python/langchain_client.py", ("anthropic",)),
    Client("instructor", "instructor", "python/instructor_client.py"),
    Client("openai-agents chat", "sdks", "python/agents_client.py", ("chat",)),
    Client("openai-agents responses", "sdks", "python/agents_client.py", ("responses",)),
    Client("pydantic-ai chat", "sdks", "python/pydantic_ai_client.py", ("chat",)),
    Client("pydantic-ai responses", "sdks", "python/pydantic_ai_client.py", ("responses",)),
    Client("pydantic-ai anthropic", "sdks", "python/pydantic_ai_client.py", ("anthropic",)),
    Client("llm", "sdks", "python/llm_command.py"),
    Client("openai-node chat", NODE, "node/openai_chat.mjs"),
    Client("openai-node responses", NODE, "node/openai_responses.mjs"),
    Client("anthropic-node", NODE, "node/anthropic.mjs", more=("tool_runner", "models")),
    Client("ai-sdk openai-compatible", NODE, "node/ai_sdk_compatible.mjs"),
    Client("ai-sdk openai chat", NODE, "node/ai_sdk_openai_chat.mjs"),
    Client("ai-sdk openai responses", NODE, "node/ai_sdk_openai_responses.mjs"),
    Client("ai-sdk anthropic", NODE, "node/ai_sdk_anthropic.mjs"),
    Client("promptfoo", NODE, "node/promptfoo.mjs"),
    Client("Claude Code", NODE, "node/claude_code.mjs"),
    Client("Codex", NODE, "node/codex.mjs"),
    Client(
        "lm-evaluation-harness",
        "evals",
        "python/lm_eval_tasks.py",
        more=("completions", "loglikelihood", "loglikelihood_in_batches", "loglikelihood_of_texts", "rolling"),
    ),
)
