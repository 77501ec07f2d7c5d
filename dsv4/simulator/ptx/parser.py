"""PTX text to the entries of a module."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dsv4.simulator.errors import UnsupportedInstruction
from dsv4.simulator.ptx.entry import Entry
from dsv4.simulator.ptx.functions import functions_of
from dsv4.simulator.ptx.reader import EntryReader, end_of_body
from dsv4.simulator.ptx.symbols import symbol


@dataclass
class Module:
    """A PTX translation unit."""

    target: str
    entries: dict[str, Entry]
    refused: dict[str, UnsupportedInstruction] = field(default_factory=dict)

    def entry(self, name: str) -> Entry:
        """An entry; raises UnsupportedInstruction for one with a construct that cannot be read,
        KeyError for an unknown name."""
        if name in self.refused:
            raise self.refused[name]
        return self.entries[name]


def parse_module(text: str) -> Module:
    """Parse one PTX module. Entries with constructs that are not simulated are refused one by one;
    UnsupportedInstruction is raised if no entry is left."""
    # Comments become blanks of the same length: line numbers stay those of the text.
    clean = re.sub(r"//[^\n]*", "", text)
    clean = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group(0)), clean, flags=re.S)
    target = re.search(r"\.target\s+(\w+)", clean)
    files = {int(n): path for n, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', clean)}
    newlines = [m.start() for m in re.finditer("\n", clean)]
    functions = functions_of(clean)
    entries: dict[str, Entry] = {}
    refused: dict[str, UnsupportedInstruction] = {}
    spans = [(function.body, end_of_body(clean, function.body)) for function in functions.values()]
    for match in re.finditer(r"\.entry\s+([\w$]+)\s*\(", clean):
        reader = EntryReader(clean, match, files, newlines, functions)
        try:
            entries[match.group(1)] = reader.read()
        except UnsupportedInstruction as error:
            refused[match.group(1)] = error
            reader.end = end_of_body(clean, match.end())
        spans.append((match.start(), reader.end))
    if refused and not entries:
        raise next(iter(refused.values()))
    outside, position = [], 0
    for start, end in sorted(spans):
        outside.append(clean[position:start])
        position = end
    outside.append(clean[position:])
    declared = re.findall(r"\.(?:shared|global|const|local)\s[^;]*;", "".join(outside))
    module_symbols = {s.name: s for s in map(symbol, declared) if s}
    for entry in entries.values():
        entry.symbols = {**module_symbols, **entry.symbols}
    return Module(target.group(1) if target else "", entries, refused)
