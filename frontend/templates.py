"""Chat templates: messages to the text a model was trained on.

The environment is that of transformers' `apply_chat_template`, so that the same template gives the same
text: sandboxed, its `tojson`, `raise_exception`, `strftime_now`, the `generation` tag and loop controls.
"""

import json
import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
import msgspec
from msgspec import UNSET

from kvmesh.frontend.arguments import WrittenArguments
from kvmesh.frontend.template_limits import MAX_SOURCE_CHARS, LimitedEnvironment, limited
from kvmesh.frontend.template_probes import ChatMessage, probe_template
from kvmesh.protocol.errors import ConfigError, InvalidRequestError

log = logging.getLogger(__name__)

MAX_REFUSAL_CHARS = 500  # of a template's words
_END_OF_FINAL = "\ue000end of the final message\ue000"  # stands there while the template is rendered
_READS_REASONING = re.compile(r"""\.reasoning\b|(["'])reasoning\1""")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """Renders chats with one compiled template and the special tokens it may write."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigError if `source` is no template."""
        self._special_tokens = dict(special_tokens)
        self.source = source
        self._knows_developer = "developer" in source
        self._reads_reasoning = _READS_REASONING.search(source) is not None
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(f"the chat template has {len(source)} characters, at most {MAX_SOURCE_CHARS} are taken")
        self._template = _compiled(source)
        # jinja2 copies these for every rendering, and chains of maps are slow to copy
        self._template.globals = dict(self._template.globals)
        self.traits = limited(lambda: probe_template(self._probed))

    @classmethod
    def load(cls, path: str | Path) -> "ChatTemplate | None":
        """The template of a model folder, None if it has none. Raises ConfigError."""
        folder = Path(path)
        config = _read_object(folder / "tokenizer_config.json")
        source = _template_source(folder, config)
        return None if source is None else cls(source, special_tokens(folder, config))

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        param: str = "messages",
    ) -> str:
        """Return the chat as text. `options` are further names for the template; `param` is where the messages come
        from, for errors.

        Raises InvalidRequestError if it refuses the messages.
        """
        plain = [self._message(message) for message in messages]
        if continue_final_message:
            plain[-1]["content"] = _marked(plain[-1].get("content"))
        try:
            values = self._values(plain, tools, options or {}, add_generation_prompt=add_generation_prompt)
            text = limited(lambda: self._text(values))
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages{self._line_of(error)}: "
                f"{str(error)[:MAX_REFUSAL_CHARS]}",
                param=param,
            ) from error
        except Exception as error:  # a template is a program: it may fail in any way
            line = self._line_of(error)
            log.warning("chat template failed%s", line, exc_info=True)
            raise InvalidRequestError(
                f"the model's chat template cannot render these messages{line}: {type(error).__name__}: "
                f"{str(error)[:MAX_REFUSAL_CHARS]}",
                param=param,
            ) from error
        return _up_to_mark(text) if continue_final_message else text

    def _values(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> dict[str, Any]:
        return {
            **self._special_tokens,
            "documents": None,
            **options,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }

    def _probed(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> str:
        return self._text(self._values(messages, tools, {}))

    def _text(self, values: Mapping[str, Any]) -> str:
        """Render as jinja2's `Template.render` does, but leave no cycles: megabytes of messages would stay in them.

        A macro refers to its context, and the context to the macro. A traceback that jinja2 makes up refers to itself.
        """
        template = self._template
        context = template.new_context(dict(values))
        try:
            return template.environment.concat(template.root_render_func(context))
        finally:
            context.vars.clear()
            context.parent.clear()

    def _line_of(self, error: Exception) -> str:
        """Return which line of the template has failed, the innermost one; "" if none is known."""
        frames = traceback.walk_tb(error.__traceback__)
        lines = [number for frame, number in frames if frame.f_code.co_filename == "<template>"]
        return f" at line {self._template.get_corresponding_lineno(lines[-1])}" if lines else ""

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        """Return the message without nulls, as transformers passes it, except for the content of a turn of calls alone,
        if the template needs it. `developer` is `system` to templates before that name, and thoughts have two names:
        DeepSeek's `reasoning_content`, vLLM's `reasoning`."""
        plain = {key: value for key, value in message.items() if value is not None}
        if "content" not in plain:
            content = self.traits.null_content if "tool_calls" in plain else ""
            if content is not UNSET:
                plain["content"] = content
        if plain.get("role") == "developer" and not self._knows_developer:
            plain["role"] = "system"
        if self._reads_reasoning and "reasoning_content" in plain:
            plain["reasoning"] = plain["reasoning_content"]
        return plain


def _marked(content: object) -> str:
    """Return the content with a mark behind it: to look for the text itself would find it in what the template writes
    after it, too.

    The space behind the mark is lost where a template strips what it is given.
    """
    if not isinstance(content, str):
        raise _not_continued("has no text")
    return content + _END_OF_FINAL + " "


def _up_to_mark(text: str) -> str:
    """Return the text without what the template writes behind the last message, so that the model continues it."""
    final, mark, rest = text.rpartition(_END_OF_FINAL)
    if not mark:
        raise _not_continued("is changed by the model's chat template")
    return final if rest.startswith(" ") else final.rstrip()


def _not_continued(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the last message {why}, so it cannot be continued",
        hint="end with a user's message, or leave continue_final_message out",
        param="continue_final_message",
    )


def special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token and its like, from tokenizer_config.json or from the older special_tokens_map.json."""
    merged = _read_object(folder / "special_tokens_map.json") | dict(config)
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        match merged.get(name):
            case str(text) | {"content": str(text)}:
                tokens[name] = text
    return tokens


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    match config.get("chat_template"):
        case str(source):
            return source
        case list(named):
            by_name = {entry["name"]: str(entry["template"]) for entry in named}
            return by_name.get("default") or next(iter(by_name.values()), None)
    return None


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, empty if there is no such file. Raises ConfigError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", hint="save the model again") from error


# --- transformers' environment --------------------------------------------------------------------------


def _compiled(source: str) -> jinja2.Template:
    """Raise ConfigError if `source` is no template."""
    try:
        return limited(lambda: _environment().from_string(source))
    except Exception as error:  # constants are computed while the template compiles, and may fail in any way
        line = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(f"the chat template does not compile{line}: {str(error)[:MAX_REFUSAL_CHARS]}") from error


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _DictFactory(),
        "namespace": _Namespace,
    }
    environment.limit_filters()
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """Lets `{% generation %}`, which marks the model's words for training, pass."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter escapes HTML."""
    if isinstance(value, WrittenArguments):
        return value.text
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _DictFactory:
    """Makes a `dict` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A `namespace` that keeps no underscore names, as in transformers: they are a way out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may write namespace(self=1)
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __repr__(self) -> str:
        return "<Namespace>"  # what is in it may have it in turn

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r} in a namespace")
