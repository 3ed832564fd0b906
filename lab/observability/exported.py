"""Compare pages of metrics with the list. Pure."""

from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from kvmesh.mesh.metric_list import PROCESS_LABELS, metric_of

OF_KINDS = frozenset({"le"})  # labels that the format itself adds


def exported(pages: Mapping[str, str]) -> tuple[set[str], list[str]]:
    """Return the declared metrics on the pages, and what on them is not declared: metrics, and labels of metrics."""
    found: set[str] = set()
    wrong: set[str] = set()
    for page in pages.values():
        for family in text_string_to_metric_families(page):
            if ":" in family.name:  # of an engine
                continue
            if (metric := metric_of(family.name)) is None:
                wrong.add(family.name)
                continue
            found.add(metric.name)
            known = {*metric.labels, *PROCESS_LABELS, *OF_KINDS}
            wrong |= {f"{metric.name}: label {label}" for s in family.samples for label in s.labels.keys() - known}
    return found, sorted(wrong)


def undeclared_names(names: Iterable[str]) -> list[str]:
    """Return the names of ours among those of a Prometheus server that no declared metric explains."""
    suffixes = ("", "_bucket", "_sum", "_count", "_created")
    return sorted(
        name
        for name in names
        if name.startswith(("kvmesh_", "gen_ai_"))
        and not any(name.endswith(suffix) and metric_of(name.removesuffix(suffix)) for suffix in suffixes)
    )
