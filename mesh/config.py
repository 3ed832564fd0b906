"""Read the settings of a service from flags, the environment and a TOML file: one declaration per option.

A schema is a frozen `msgspec.Struct`; each field is an option, its `Meta(description=...)` the help text.
`block_size` is then `--block-size`, `KVMESH_ROUTER_BLOCK_SIZE` and `block_size = ...` in the file.
A field without a description is no option: code and tests set it, operators do not.
Field types: int, float, bool, str, Literal, Enum, tuples and lists of those, and each of them `| None`.
A schema may name the options that people use in `COMMON`, a class variable: `--help` shows these, `--help-all` all.
"""

import difflib
import enum
import shutil
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec

from kvmesh.mesh.removed_settings import REFUSED_FROM, REMOVED_IN, removed_settings
from kvmesh.protocol.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

MAX_SHOWN_CHARS = 200  # of a value in an error
_FALSE = ("false", "0", "no", "off")
_TRUE = ("true", "1", "yes", "on")
_NONE = "none"
_HELP = ("--help", "-h", "--help-all")


class OptionRow(NamedTuple):
    """The texts about one option in `--help` and the documentation."""

    flag: str
    env: str
    default: str
    help: str


class Group(NamedTuple):
    """Options of another schema, which a command takes and passes on to another part."""

    title: str  # above them in `--help`
    schema: type[msgspec.Struct]
    left_out: frozenset[str] = frozenset()  # names that the command decides itself


class _Nothing(msgspec.Struct):
    """A schema without options."""


class Given(NamedTuple):
    """A value that somebody set, and the place where. Every error about the value begins with `source`."""

    source: str
    value: object = None  # typed already; counts only without `texts`
    texts: tuple[str, ...] = ()  # still to be parsed; more than one where a flag was repeated


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    annotation: Any  # of the field, Annotated and all
    kinds: tuple[Any, ...]  # what it may be besides None
    nullable: bool
    is_list: bool  # then `kinds` are those of an item
    default: object  # msgspec.NODEFAULT: required
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def negation(self) -> str:
        return "--no-" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return self.kinds == (bool,) and not self.is_list

    @property
    def negatable(self) -> bool:
        return self.is_switch or self.nullable


def load(
    schema: type[T],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prefix: str,
    prog: str,
    description: str = "",
    section: str | None = None,
    foreign: Sequence[str] = (),
) -> T:
    """Read settings from `argv` (without the program's name), then `environ`, then the file, then the defaults.

    The file is that of `--config` or `<prefix>CONFIG`. With `section` it may serve many services, and only
    its table `[section]` counts. An environment variable that is set but empty counts as not set.
    `foreign`: prefixes and names in the environment that begin with `prefix` but belong to others.
    Raises ConfigError for what is unknown or out of range, SystemExit(0) after printing `--help`.
    """
    settings, _ = load_with_groups(
        schema, (), argv, environ, prefix=prefix, prog=prog, description=description, section=section, foreign=foreign
    )
    return settings


def load_with_groups(
    schema: type[T],
    groups: Sequence[Group],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prefix: str,
    prog: str,
    description: str = "",
    section: str | None = None,
    foreign: Sequence[str] = (),
) -> tuple[T, list[dict[str, Any]]]:
    """Read settings as `load` does, and for each group the values that somebody gave for its options.

    An option that several groups have goes to each of them. An option that `schema` has too is not the group's.
    Options that were removed are read as well; one line on stderr says that they have no effect.
    """
    own = _options(schema)
    offered = [_group_options(group, own) for group in groups]
    removed = _removed_options(prefix)
    options = {name: option for options in reversed([own, *offered, removed]) for name, option in options.items()}
    flags = _given_flags(options, argv, prog)
    if "help" in flags:
        with_all = flags["help"].source == "--help-all"
        print(usage(schema, prefix=prefix, prog=prog, description=description, groups=groups, with_all=with_all))
        raise SystemExit(0)
    env = _given_env(options, environ, prefix, foreign)
    path = flags.pop("config", None) or env.pop("config", None)
    env.pop("config", None)
    file = _given_file(options, path, section) if path else {}
    given = file | env | flags
    if without_effect := [given[name].source for name in given if options[name] is removed.get(name)]:
        listed = f"{', '.join(without_effect)}: no effect since kvmesh {REMOVED_IN}"
        print(f"{prog}: {listed}, and refused from {REFUSED_FROM}: please remove", file=sys.stderr)
    settings = _build(schema, own, {name: value for name, value in given.items() if name in own}, prefix, prog)
    passed_on = [{name: _value(group[name], given[name]) for name in group if name in given} for group in offered]
    return settings, passed_on


def load_given(
    schema: type[msgspec.Struct],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prefix: str,
    prog: str,
    section: str | None = None,
) -> dict[str, Any]:
    """Return the values that somebody gave, without the defaults, where `load` reads them. Raises ConfigError."""
    group = Group("", schema)
    _, [values] = load_with_groups(_Nothing, [group], argv, environ, prefix=prefix, prog=prog, section=section)
    return values


def _group_options(group: Group, own: Mapping[str, "_Option"]) -> dict[str, "_Option"]:
    left_out = {*own, *group.left_out}
    return {name: option for name, option in _options(group.schema).items() if name not in left_out}


def config_path(argv: Sequence[str], environ: Mapping[str, str], prefix: str) -> str:
    """Return the file that `load` reads with these arguments, "" if none. A command hands it on to another service."""
    for i, word in enumerate(argv):
        if word == "--config" and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith("--config="):
            return word.removeprefix("--config=")
    return environ.get(_env_name(prefix, "config"), "")


def to_flags(settings: msgspec.Struct) -> list[str]:
    """Return flags from which `load` builds equal settings, whatever the environment says."""
    return [_flag_for(option, getattr(settings, option.name)) for option in _options(type(settings)).values()]


def flags_of(schema: type[msgspec.Struct], values: Mapping[str, object]) -> list[str]:
    """Return the flags that set the options in `values`, and no other."""
    options = _options(schema)
    return [_flag_for(options[name], value) for name, value in values.items()]


def environ_of(values: Mapping[str, object], prefix: str) -> dict[str, str]:
    """Return the environment variables that set the options in `values`."""
    return {_env_name(prefix, name): _NONE if value is None else _to_text(value) for name, value in values.items()}


def describe(schema: type[msgspec.Struct], *, prefix: str) -> list[OptionRow]:
    """Return all options of a schema, in order, for `--help` and the documentation."""
    return [_row(option, prefix) for option in _options(schema).values()]


def _row(option: "_Option", prefix: str) -> OptionRow:
    return OptionRow(_flag_help(option), _env_name(prefix, option.name), _default_text(option), option.help)


def usage(
    schema: type[msgspec.Struct],
    *,
    prefix: str,
    prog: str,
    description: str = "",
    groups: Sequence[Group] = (),
    with_all: bool = False,
) -> str:
    """Return the text of `--help`, or of `--help-all`."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 60), 110)
    own = _options(schema)
    shown: dict[str, _Option] = {}
    sections: list[tuple[str, list[OptionRow]]] = []
    is_short = False
    for title, part, options in [
        ("options", schema, own),
        *((group.title, group.schema, _group_options(group, own)) for group in groups),
    ]:
        new = {name: option for name, option in options.items() if name not in shown}
        chosen = new if with_all else {name: new[name] for name in common_names(part) if name in new}
        is_short |= len(chosen) < len(new)
        shown |= chosen
        sections.append((title, [_row(option, prefix) for option in chosen.values()]))
    sections[0][1].extend(_rows_for_all(prefix, is_short))
    indent = min(max(len(row.flag) for _, rows in sections for row in rows) + 4, 34)
    parts = [f"usage: {prog} [options]"]
    if description:
        parts.append(textwrap.fill(description, width))
    parts += [
        f"{title}:\n" + "\n".join(_help_lines(row, indent, width) for row in rows) for title, rows in sections if rows
    ]
    if is_short:
        parts.append(f"`{prog} --help-all` lists all options")
    return "\n\n".join(parts)


def common_names(schema: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the options of a schema that `--help` shows: those of its `COMMON`, or all where it has none."""
    names: tuple[str, ...] = getattr(schema, "COMMON", schema.__struct_fields__)
    return names


def _rows_for_all(prefix: str, is_short: bool) -> list[OptionRow]:
    rows = [
        OptionRow("--config PATH", _env_name(prefix, "config"), "", "TOML file with settings"),
        OptionRow("--help", "", "", "show this and exit"),
    ]
    return [*rows, OptionRow("--help-all", "", "", "show all options and exit")] if is_short else rows


# --- the schema ---------------------------------------------------------------------------------------


def _options(schema: type[msgspec.Struct]) -> dict[str, _Option]:
    """Return the options of a schema by field name. Raises TypeError for a field that cannot be an option."""
    fields = [field for field in msgspec.structs.fields(schema) if _strip(field.type)[1]]
    options = {field.name: _option(field) for field in fields}
    names = [option.flag for option in options.values()]
    names += [option.negation for option in options.values() if option.negatable]
    names += ["--config", *_HELP]
    clashes = {name for name in names if names.count(name) > 1}
    if clashes:
        raise TypeError(f"{schema.__name__}: two options are called {', '.join(sorted(clashes))}")
    return options


def _option(field: msgspec.structs.FieldInfo) -> _Option:
    bare, help_text = _strip(field.type)
    kinds = _members(bare)
    nullable = type(None) in kinds
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    is_list = len(kinds) == 1 and get_origin(kinds[0]) in (tuple, list)
    if is_list:
        items = [item for item in get_args(kinds[0]) if item is not Ellipsis]
        kinds = tuple(dict.fromkeys(kind for item in items for kind in _members(_strip(item)[0])))
    for kind in kinds:
        _check_kind(field.name, kind)
    default = field.default_factory() if callable(field.default_factory) else field.default
    return _Option(field.name, field.type, kinds, nullable, is_list, default, help_text)


def _strip(annotation: Any) -> tuple[Any, str]:
    """Return an annotation without its metadata, and the description found in the metadata."""
    if get_origin(annotation) is not Annotated:
        return annotation, ""
    inner, *metadata = get_args(annotation)
    texts = [m.description for m in metadata if isinstance(m, msgspec.Meta) and m.description]
    return inner, " ".join(texts)


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(_strip(member)[0] for member in get_args(annotation))
    return (annotation,)


def _check_kind(name: str, kind: Any) -> None:
    is_enum = isinstance(kind, type) and issubclass(kind, enum.Enum)
    if not (kind in (int, float, bool, str) or get_origin(kind) is Literal or is_enum):
        raise TypeError(f"setting {name!r}: {kind!r} cannot be an option")


def _removed_options(prefix: str) -> dict[str, _Option]:
    """Return the options that were removed from this service. Any value is accepted."""
    removed = removed_settings(prefix)
    return {
        name: _Option(name, Any, (kind,), nullable=True, is_list=False, default=None, help="")
        for names, kind in ((removed.names, str), (removed.switches, bool))
        for name in names
    }


# --- what was given -----------------------------------------------------------------------------------


def _given_flags(options: Mapping[str, _Option], argv: Sequence[str], prog: str) -> dict[str, Given]:
    """Return the values that `argv` sets, by field name. The names `config` and `help` may occur too."""
    given: dict[str, Given] = {}
    args = iter(argv)
    for arg in args:
        flag, equals, text = arg.partition("=")
        if flag in _HELP:
            return {"help": Given(flag, True)}
        if flag == "--config":
            given["config"] = Given(flag, texts=(text if equals else _next_value(flag, args),))
            continue
        option, negated = _find_flag(options, flag, prog)
        if negated and equals:
            raise ConfigError(f"{flag} takes no value", hint=f"write {option.flag}={text}")
        if negated:
            given[option.name] = Given(flag, False if option.is_switch else None)
        elif option.is_switch and not equals:
            given[option.name] = Given(flag, True)
        else:
            _add_text(given, option, flag, text if equals else _next_value(flag, args))
    return given


def _add_text(given: dict[str, Given], option: _Option, flag: str, text: str) -> None:
    """Record the text of a flag: the last flag wins, but a list grows with each."""
    before = given[option.name].texts if option.is_list and option.name in given else ()
    given[option.name] = Given(flag, texts=(*before, text))


def _next_value(flag: str, args: Iterator[str]) -> str:
    value = next(args, None)
    if value is None or value.startswith("--"):
        raise ConfigError(f"{flag} needs a value", hint=f"write {flag}=VALUE")
    return value


def _find_flag(options: Mapping[str, _Option], flag: str, prog: str) -> tuple[_Option, bool]:
    by_flag = {option.flag: (option, False) for option in options.values()}
    by_flag |= {option.negation: (option, True) for option in options.values() if option.negatable}
    if flag in by_flag:
        return by_flag[flag]
    if not flag.startswith("-"):
        raise ConfigError(f"unexpected argument {flag!r}", hint=f"see {prog} --help")
    raise unknown(f"flag {flag}", flag, [*by_flag, "--config", *_HELP], f"see {prog} --help")


def _given_env(
    options: Mapping[str, _Option], environ: Mapping[str, str], prefix: str, foreign: Sequence[str]
) -> dict[str, Given]:
    known = {_env_name(prefix, name): name for name in [*options, "config"]}
    given: dict[str, Given] = {}
    for key, text in environ.items():
        if not key.startswith(prefix) or (key not in known and key.startswith(tuple(foreign))):
            continue
        if key not in known:
            raise unknown(f"environment variable {key}", key, known, "unset it")
        if text:
            given[known[key]] = Given(key, texts=(text,))
    return given


def _given_file(options: Mapping[str, _Option], path: Given, section: str | None) -> dict[str, Given]:
    name = path.texts[0]
    try:
        content = msgspec.toml.decode(Path(name).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path.source} {name}: {error}", hint="give a TOML file") from error
    table = _section(content, section, name) if section else content
    for key in table:
        if key not in options:
            raise unknown(f"setting {key!r} in {name}", key, options, "remove it")
    return {key: Given(f"{key} in {name}", value) for key, value in table.items()}


def _section(content: Mapping[str, object], section: str, path: str) -> Mapping[str, object]:
    """Return the table `[section]` of a file that many services share."""
    for key, value in content.items():
        if not isinstance(value, dict):
            raise ConfigError(f"setting {key!r} in {path} is in no table", hint=f"put it under [{section}]")
    near = difflib.get_close_matches(section, content, 1, 0.75)
    if section not in content and near:
        raise ConfigError(f"{path} has a table [{near[0]}]", hint=f"did you mean [{section}]?")
    table = content.get(section, {})
    assert isinstance(table, dict)
    return table


def unknown(what: str, name: str, known: Iterable[str], otherwise: str) -> ConfigError:
    """Return the error for a name that is not in `known`: its hint is the nearest known name, or else `otherwise`."""
    near = difflib.get_close_matches(name, list(known), 1)
    return ConfigError(f"unknown {what}", hint=f"did you mean {near[0]}?" if near else otherwise)


# --- from what was given to values --------------------------------------------------------------------


def _build(schema: type[T], options: Mapping[str, _Option], given: Mapping[str, Given], prefix: str, prog: str) -> T:
    for option in options.values():
        if option.default is msgspec.NODEFAULT and option.name not in given:
            env = _env_name(prefix, option.name)
            raise ConfigError(f"{option.flag} is required ({option.help})", hint=f"give it, or set {env}")
    values = {name: _value(options[name], setting) for name, setting in given.items()}
    try:
        return schema(**values)
    except ValueError as error:  # from a __post_init__ that checks fields against each other
        raise ConfigError(f"bad settings: {error}", hint=f"see {prog} --help") from error


def _value(option: _Option, given: Given) -> object:
    """Return the value of one option. Raises ConfigError, which names the place and the accepted values."""
    if not all(map(_is_unicode, given.texts)):
        raise ConfigError(f"bad setting: {given.source} is not UTF-8", hint="set LC_ALL=C.UTF-8, or write it in ASCII")
    value = _from_texts(option, given.texts) if given.texts else given.value
    try:
        return msgspec.convert(value, option.annotation)
    except msgspec.ValidationError as error:
        shown = _shortened(",".join(given.texts)) if given.texts else given.value
        detail = _shortened(str(error).removesuffix(" - at `$`"))
        raise ConfigError(
            f"bad setting: {given.source} is {shown!r}", hint=f"want {_kind_text(option)} ({detail})"
        ) from error


def _is_unicode(text: str) -> bool:
    """Return whether the bytes of an argument could be decoded: the others become surrogates, which nothing encodes."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _shortened(text: str) -> str:
    """Return a text for an error, which is one line."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... ({len(text)} characters)"


def _from_texts(option: _Option, texts: Sequence[str]) -> object:
    if option.is_list:
        items = [item for text in texts for item in _split(text)]
        return [_from_text(option.kinds, item) for item in items]
    if option.nullable and str not in option.kinds and texts[-1] == _NONE:
        return None
    return _from_text(option.kinds, texts[-1])


def _split(text: str) -> list[str]:
    """Split `a,b` into [a, b]. A JSON list of strings is read as JSON: it can hold commas and empty items."""
    if text.startswith("["):
        try:
            return msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError:
            pass  # an IPv6 address, for example
    return [item.strip() for item in text.split(",")] if text else []


def _from_text(kinds: Sequence[Any], text: str) -> object:
    """Return the value of `text` in the first of `kinds` that fits; else the text, which `convert` will refuse."""
    for kind in kinds:
        if kind is bool:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
            continue
        try:
            return msgspec.convert(text, kind, strict=kind is str)
        except msgspec.ValidationError:
            continue
    return text


# --- from values to texts -----------------------------------------------------------------------------


def _flag_for(option: _Option, value: object) -> str:
    if option.is_switch and isinstance(value, bool):
        return option.flag if value else option.negation
    if value is None:
        return f"{option.flag}={_NONE}" if option.is_switch else option.negation
    return f"{option.flag}={_to_text(value)}"


def _to_text(value: object) -> str:
    if isinstance(value, tuple | list):
        items = [_to_text(item) for item in value]
        plain = all(item and item == item.strip() and "," not in item and item[0] != "[" for item in items)
        return ",".join(items) if plain else msgspec.json.encode(items).decode()
    if isinstance(value, enum.Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _env_name(prefix: str, name: str) -> str:
    return prefix + name.upper()


def _default_text(option: _Option) -> str:
    if option.default is msgspec.NODEFAULT:
        return "required"
    if option.default is None:
        return _NONE
    return _to_text(option.default) or '""'


def _flag_help(option: _Option) -> str:
    if option.is_switch:
        return f"{option.flag} | {option.negation}"
    return f"{option.flag} {_kind_text(option)}"


def _kind_text(option: _Option) -> str:
    item = "|".join(_one_kind_text(kind) for kind in option.kinds)
    return f"{item},..." if option.is_list else item


def _one_kind_text(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(kind)) + "}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "{" + ",".join(str(member.value) for member in kind) + "}"
    return {int: "INT", float: "NUMBER", bool: "BOOL", str: "TEXT"}[kind]


def _help_lines(row: OptionRow, indent: int, width: int) -> str:
    notes = [f"default: {row.default}" if row.default not in ("", "required") else row.default, row.env]
    text = f"{row.help} [{', '.join(note for note in notes if note)}]" if any(notes) else row.help
    lines = textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False)
    head = "  " + row.flag
    if len(head) > indent - 2:
        return "\n".join([head, *(" " * indent + line for line in lines)])
    return "\n".join([head.ljust(indent) + lines[0], *(" " * indent + line for line in lines[1:])])
