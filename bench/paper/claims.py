"""Every number of bench/data/paper.yaml as a claim: where it stands, its value, confidence and source."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Number


@dataclass(frozen=True, slots=True)
class Claim:
    """``keys``: the way to it from the top; cells and claims of a list by their names."""

    keys: tuple[str, ...]
    value: float
    confidence: str
    source: str
    note: str = ""


def claims(paper: dict) -> list[Claim]:
    """All of them, in the order of the file. KeyError where a number has no confidence, or that no source."""
    sources, out = paper["sources"], []

    def walk(node, keys: tuple[str, ...], confidence: str | None, note: str) -> None:
        if isinstance(node, dict):
            inner = node.get("confidence", confidence)
            said = node.get("note") or node.get("formula") or note
            for key, value in node.items():
                if key not in ("confidence", "note", "formula", "sources"):
                    walk(value, keys if key == "value" else (*keys, str(key)), inner, said)
        elif isinstance(node, list):
            for i, value in enumerate(node):
                walk(value, (*keys, name_of(value, i)), confidence, note)
        elif isinstance(node, Number) and not isinstance(node, bool):
            if confidence is None:
                raise KeyError(f"{'.'.join(keys)}: a number without confidence")
            out.append(Claim(keys, float(node), confidence, sources[confidence.split()[0]], note))

    walk(paper, (), None, "")
    return out


def name_of(item, index: int) -> str:
    """How a list's item is called in a path: by cell, by claim, or by its place."""
    if isinstance(item, dict) and "testbed" in item:
        return f"{item['model']} {item['testbed']} {item['max_response'] // 1024}K"
    if isinstance(item, dict) and "claim" in item:
        return item["claim"]
    return str(item) if not isinstance(item, dict) else str(index)
