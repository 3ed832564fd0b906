"""Compare our answers with what a vendor sends: field by field, null by null.

`vendors/<api>.csv` holds the facts. One line is one field of one object: `object,field,sent,holds,source`.

`sent` is one of
- `value`: the field is always there and never null;
- `null`: the field is always there, and null as long as nobody asks for a feature that we do not have;
- `either`: the field is always there, with a value or with null;
- `optional`: the field may be absent, and is never null;
- `nullable`: the field may be absent, null or a value;
- `absent`: the vendor does not send the field in the answers that we give, so we do not either;
- `ours`: the field is an extension of kvmesh, which is there on request only.

`holds` names the object that the value is, or that the items of the list are. Where the table has the object
`NAME:TYPE`, with the `type` of the value, that one counts. `source` says where the fact comes from.

A field that the table does not have is an error, so a new field needs a new fact.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "vendors"
NEEDED = {"value", "null", "either"}
NEVER_NULL = {"value", "optional", "ours"}
SENT = {*NEEDED, *NEVER_NULL, "nullable", "absent"}


@dataclass(frozen=True, slots=True)
class Fact:
    """Says how a vendor sends one field."""

    field: str
    sent: str
    holds: str


@cache
def facts(api: str) -> dict[str, dict[str, Fact]]:
    """Return the facts of one API, by object and by field."""
    found: dict[str, dict[str, Fact]] = {}
    with (FOLDER / f"{api}.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            assert row["sent"] in SENT, f"{api}.csv: {row}"
            assert row["source"], f"{api}.csv: a fact without a source: {row}"
            fields = found.setdefault(row["object"], {})
            assert row["field"] not in fields, f"{api}.csv: two facts on {row['object']}.{row['field']}"
            fields[row["field"]] = Fact(row["field"], row["sent"], row["holds"])
    return found


def differences(api: str, kind: str, document: Any, where: str = "") -> list[str]:
    """Return a sentence for each field in which `document`, an object of the `kind`, is not as the vendor sends it."""
    objects = facts(api)
    kind = kind_of(objects, kind, document)
    where = where or kind
    if kind not in objects:
        return [f"{where}: there are no facts on {kind}"]
    known = objects[kind]
    found = [f"{where}.{name}: the vendor has no such field" for name in document if name not in known]
    for name, fact in known.items():
        if name not in document:
            found += [f"{where}.{name}: it is missing"] if fact.sent in NEEDED else []
            continue
        value = document[name]
        found += [f"{where}.{name}: {problem}" for problem in field_problems(fact, value)]
        if fact.holds and value is not None and fact.sent != "absent":
            items = value if isinstance(value, list) else [value]
            for number, item in enumerate(items):
                place = f"{where}.{name}[{number}]" if isinstance(value, list) else f"{where}.{name}"
                found += differences(api, fact.holds, item, place)
    return found


def field_problems(fact: Fact, value: Any) -> list[str]:
    """Return what is wrong with the value of one field that we have sent."""
    if fact.sent == "absent":
        return ["the vendor does not send it"]
    if value is None and fact.sent in NEVER_NULL:
        return ["it is null"]
    if value is not None and fact.sent == "null":
        return ["it is not null"]
    return []


def kind_of(objects: dict[str, dict[str, Fact]], kind: str, document: Any) -> str:
    """Return the name of the object in the table, which may depend on the type of the document."""
    tagged = f"{kind}:{document.get('type')}" if isinstance(document, dict) else kind
    return tagged if tagged in objects else kind
