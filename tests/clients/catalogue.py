"""List the clients that `make test-clients` runs, in the order of the table in docs/api.md."""

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENTS = ROOT / ".venv-clients"
FLOWS = ("chat", "stream", "second_turn", "tools", "structured", "usage", "error", "cancel")
NODE = "node"


PARTS = ("sdks", "tools")  # tools: whatever takes long to install or to run


@dataclass(frozen=True, slots=True)
class Client:
    """A script for one client. `more`: flows beyond the eight that its script reports."""

    name: str
    environment: str  # of requirements/
    script: str
    arguments: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    packages: str = ""  # a folder with package.json and package-lock.json, if not that of the script
    part: str = "sdks"

    def __post_init__(self) -> None:
        if self.environment == NODE and not self.packages:
            object.__setattr__(self, "packages", str(Path(self.script).parent))

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
    Client("promptfoo", NODE, "node/promptfoo.mjs", packages="node/promptfoo", part="tools"),
    Client("Claude Code", NODE, "node/claude_code.mjs", packages="node/agents", part="tools"),
    Client("Codex", NODE, "node/codex.mjs", packages="node/agents", part="tools"),
    Client("Continue", NODE, "node/continue_cli.mjs", packages="node/agents", part="tools"),
    Client("aiperf", "aiperf", "python/aiperf_command.py", more=("completions", "responses", "messages"), part="tools"),
    Client("guidellm", "guidellm", "python/guidellm_command.py", more=("completions", "responses"), part="tools"),
    Client(
        "lm-evaluation-harness",
        "evals",
        "python/lm_eval_tasks.py",
        part="tools",
        more=("completions", "loglikelihood", "loglikelihood_in_batches", "loglikelihood_of_texts", "rolling"),
    ),
)


def clients_of(part: str) -> list[Client]:
    """Return the clients of a part, or all of them for "all"."""
    return [client for client in CLIENTS if part in ("all", client.part)]
