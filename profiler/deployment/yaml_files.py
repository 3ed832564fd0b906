"""Write YAML that people can read: texts of several lines are blocks, lists of plain values stand in one line."""

import re
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z/][\w./-]*(?: [\w./-]+)*")  # needs no quotes in any version of YAML


class _Dumper(yaml.SafeDumper):
    """PyYAML's writer without anchors, so that people can edit one place alone."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=flow and indentless)


def to_yaml(*documents: Any) -> str:
    """Return one document for each value. Keys keep their order."""
    return yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, width=1 << 20, allow_unicode=False, explicit_start=False
    )


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None if _PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    is_flat = not any(isinstance(item, dict | list) for item in items)
    node = dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=is_flat)
    for item, text in zip(items, node.value, strict=True):
        if is_flat and isinstance(item, str):
            text.style = '"'
    return node


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)
