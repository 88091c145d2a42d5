"""The model card: one marked block of measured numbers, and metadata that the author has not set already."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from huggingface_hub import ModelCard

from espalier_format.errors import SchemaError

if TYPE_CHECKING:
    from espalier_format.operations.inspect_report import InspectReport, Storage
    from espalier_format.schema.manifest import Manifest

CARD_NAME: Final = "README.md"
BEGIN: Final = "<!-- espalier-format:begin (upload replaces everything up to the end mark) -->"
END: Final = "<!-- espalier-format:end -->"

_BLOCK = re.compile(r"<!-- espalier-format:begin\b[^>]*-->.*?<!-- espalier-format:end -->", re.DOTALL)
_FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n")
_FORMATS: Final = {
    "espalier": "Espalier",
    "exl3": "EXL3",
    "compressed-tensors": "compressed-tensors",
    "plain": "safetensors",
}
_TAGS: Final = {"compressed-tensors": ["compressed-tensors"], "plain": None}
_UNITS: Final = (" B", " kB", " MB", " GB", " TB")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the card says: where the checkpoint goes, what its headers and manifest say, what it was made from."""

    repo_id: str
    report: InspectReport
    manifest: Manifest
    base_model: str | None = None
    license: str | None = None


def write_card(existing: str | None, facts: CardFacts) -> tuple[str, tuple[str, ...]]:
    """Return the model card and warnings; the same facts and text give the same card, byte for byte.

    Of an existing card all is kept but the marked block, which is replaced where it stands, or added at the
    end. Metadata keys that the author has set keep their values; tags are added. The front matter is written
    anew, by huggingface_hub, only where a key is added.

    Raises:
        SchemaError: the front matter is no YAML object that huggingface_hub accepts, or the block's marks are broken.
    """
    text = f"# {facts.repo_id.rpartition('/')[2]}\n" if existing is None else existing
    marks = [text.count("<!-- espalier-format:begin"), text.count("espalier-format:end -->"), len(_BLOCK.findall(text))]
    if marks not in ([0, 0, 0], [1, 1, 1]):
        raise SchemaError("the marks of espalier-format's block are damaged; remove them", path=CARD_NAME)
    newline = "\r\n" if "\r\n" in text else "\n"
    block = "\n".join((BEGIN, *_lines(facts), END)).replace("\n", newline)
    text, replaced = _BLOCK.subn(lambda _: block, text)
    if not replaced:
        text = text.rstrip() + newline * 2 + block + newline
    return _with_metadata(text, facts, newline)


def authors_text(card: str) -> str:
    """Return what is left of a card without the marked block and the front matter: what its author wrote."""
    return re.sub(r"^\s*---\r?\n.*?\r?\n---[ \t]*(\r?\n|$)", "", _BLOCK.sub("", card), count=1, flags=re.DOTALL).strip()


def is_untouched(authors: str) -> bool:
    """Tell whether an author's text is only what ``write_card`` makes of nothing: a heading."""
    return re.fullmatch(r"(# \S+)?", authors) is not None


def _with_metadata(text: str, facts: CardFacts, newline: str) -> tuple[str, tuple[str, ...]]:
    had = _FRONT_MATTER.match(text) is not None
    try:
        card = ModelCard(text if had else f"---{newline}{newline}---{newline}{text}")
    except Exception as error:  # ValueError, TypeError, and what the YAML library of huggingface_hub has of its own
        reason = " ".join(str(error).split())[:200]
        raise SchemaError(f"the metadata at the top cannot be read: {reason}", path=CARD_NAME) from error
    data: Any = card.data  # its methods are not annotated
    before = data.to_dict()
    warnings = []
    for key, value in _metadata(facts).items():
        stated = before.get(key)
        if key == "tags":
            tags = [stated] if isinstance(stated, str) else list(stated or [])
            if not set(value) <= set(tags):
                data.tags = tags + [tag for tag in value if tag not in tags]
        elif stated is None:
            setattr(data, key, value)
        elif stated not in (value, [value]):
            warnings.append(f"{CARD_NAME} keeps {key}: {stated!r}, not {value!r}")
    warnings += [f"{CARD_NAME} states no {key}" for key in ("base_model", "license") if data.get(key) is None]
    changed = data.to_dict() != before
    return (str(card) if changed else text), tuple(warnings)


def _metadata(facts: CardFacts) -> dict[str, Any]:
    stated = facts.manifest.base_model
    base_model = facts.base_model or (stated.repo if stated is not None else None)
    values = {
        "license": facts.license or (stated.license if stated is not None else None),
        "base_model": base_model,
        "base_model_relation": "quantized" if base_model is not None and facts.report.format != "plain" else None,
        "tags": _TAGS.get(facts.report.format, [facts.report.format, "trellis-quantization"]),
    }
    return {key: value for key, value in values.items() if value is not None}


def _lines(facts: CardFacts) -> list[str]:
    report = facts.report
    kind = _FORMATS[report.format]
    version = "" if report.format_version is None else f", format version {report.format_version}"
    shards = sum(file.kind == "shard" for file in report.files)
    # Of the tensors and shards only: the size of all files would change with the card itself.
    size = f"{_size(report.total.bytes)} of tensors in {shards} shard{'' if shards == 1 else 's'}"
    lines = ["## Quantization", "", f"{kind} checkpoint{version}, {size}."]
    if report.bits is not None:
        lines += ["", f"{report.bits:.2f} bits per weight in the decoder ({report.bits_with_scales:.3f} with scales)"]
        lines[-1] += "." if report.head_bits is None else f", {report.head_bits:.2f} in the head."
    lines += [
        "",
        "| component | stored as | modules | weights | bits per weight | with scales | size |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for component in report.components:
        lines += [_row(component.name, part) for part in component.storage]
    lines += ["", "All numbers are computed from the stored tensors, padding included."]
    return lines + _how_to_load(facts) + _how_to_verify(facts)


def _row(component: str, part: Storage) -> str:
    bits = "" if part.bits is None else f"{part.bits:.3f}"
    scales = f"{part.bits_with_scales:.3f}" if part.quantized and part.bits_with_scales is not None else ""
    modules = f"{part.modules:,}" if part.quantized else ""
    return f"| {component} | {part.name} | {modules} | {part.weights:,} | {bits} | {scales} | {_size(part.bytes)} |"


def _how_to_load(facts: CardFacts) -> list[str]:
    folder = facts.repo_id.rpartition("/")[2]
    lines = ["", "### Load", "", "```sh", f"hf download {facts.repo_id} --local-dir {folder}", "```"]
    if facts.report.format == "plain":
        return lines
    return [
        *lines,
        "",
        "```python",
        "from espalier_format import open_checkpoint",
        "",
        f'with open_checkpoint("{folder}") as checkpoint:',
        f"    for name in checkpoint.{'packed' if facts.report.format == 'compressed-tensors' else 'modules'}:",
        '        weight = checkpoint.decode(name, "bfloat16", device="cpu")  # a torch tensor, (out, in)',
        "```",
    ]


def _how_to_verify(facts: CardFacts) -> list[str]:
    folder = facts.repo_id.rpartition("/")[2]
    digests = len(facts.manifest.decode_digests or {})
    deep = f"  # every file, and the decoded codes of {digests:,} modules" if digests else "  # every file"
    return [
        "",
        "### Verify",
        "",
        "```sh",
        f"espalier-format verify {facts.repo_id} --remote  # the manifest against the Hub's records, no download",
        f"espalier-format verify {folder}{' --deep' if digests else ''}{deep}",
        "```",
    ]


def _size(number: int) -> str:
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{number} B" if unit == 0 else f"{value:.{max(0, 3 - len(str(int(value))))}f}{_UNITS[unit]}"
