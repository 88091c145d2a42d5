"""Names matched in bulk rank as they do one by one, by rules that are written down here a second time."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_format.checkpoint.components import Component, component_of
from espalier_format.converters.compressed_tensors_patterns import Names, spell

PATH = Path("config.json")
PREFIXES = ("model.language_model.", "language_model.model.", "model.")
PARTS = ["layers.0", "layers.1", "layers.10", "mlp", "experts.3", "up_proj", "q_proj", "lm_head", "embed_tokens", "mtp"]
PARTS += ["x" * 250, "visual"]
MODULES = st.builds(
    lambda prefix, parts: prefix + ".".join(parts),
    st.sampled_from(["", "model.", "model.language_model.", "language_model.model.", "model.model."]),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=4),
)
EXPRESSIONS = st.sampled_from(
    [
        r"re:.*up_proj$", r"re:.*layers\.(0|1)\..*", r"re:^mtp", r"re:model\.layers", r"re:language_model\.model\.mlp",
        r"re:.*experts\.\d+\.up_proj", r"re:.*[qk]_proj", r"re:(?!.*mlp).*", r"re:model.language_model.mlp",
        r"re:(?i).*MLP",
    ]
)  # fmt: skip
ENTRIES = st.lists(st.one_of(MODULES, EXPRESSIONS, st.sampled_from(["Linear", "Embedding", "Conv1d"])), max_size=6)


def other_names(module: str) -> list[str]:
    first = next((prefix for prefix in PREFIXES if module.startswith(prefix)), None)
    if first is None or "visual" in module.split("."):
        return []
    return [other + module[len(first) :] for other in PREFIXES if other != first]


def matches(entry: str, name: str) -> bool:
    return len(name) <= 256 and re.compile(entry[3:]).match(name) is not None


def expected_rank(entries: list[str], module: str) -> int:
    expressions = [entry for entry in entries if entry.startswith("re:")]
    if module in entries:
        return 6
    if any(matches(entry, module) for entry in expressions):
        return 4
    for other in other_names(module):
        if other in entries:
            return 5
        if any(matches(entry, other) for entry in expressions):
            return 3
    if component_of(module) is Component.EMBEDDINGS:
        return 2 if "Embedding" in entries else int("Linear" in entries)
    return 2 if "Linear" in entries else 0


def expected_idle(entries: list[str], modules: list[str]) -> list[str]:
    names = [name for module in modules for name in (module, *other_names(module))]
    idle = []
    for entry in dict.fromkeys(entries):
        if entry in ("Linear", "Embedding", "Conv1d"):
            continue
        used = any(matches(entry, name) for name in names) if entry.startswith("re:") else entry in names
        if not used:
            idle.append(entry)
    return idle


@settings(max_examples=300, deadline=None)
@given(entries=ENTRIES, modules=st.lists(MODULES, max_size=8), early=st.booleans())
def test_bulk_is_one_by_one(entries: list[str], modules: list[str], early: bool) -> None:
    spelled = spell(modules)
    assert {name: list(others) for name, others in spelled.items()} == {name: other_names(name) for name in modules}
    names = Names.parse(entries, "ignore", PATH)
    if early:
        live = names.prepare(spelled)
        assert list(names.idle(spelled, live)) == expected_idle(entries, modules)
    assert [names.rank(module) for module in modules] == [expected_rank(entries, module) for module in modules]
    assert list(names.idle(spelled)) == expected_idle(entries, modules)
