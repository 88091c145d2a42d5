"""The model card: what its author wrote stays, what upload writes is replaced and follows from the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from espalier_format.container.folder import CheckpointFolder
from espalier_format.errors import SchemaError
from espalier_format.hub.card import BEGIN, END, CardFacts, authors_text, write_card
from espalier_format.operations.inspect import inspect_checkpoint
from espalier_format.operations.verify_files import read_manifest
from espalier_format.schema.manifest import BaseModelReference


@pytest.fixture(scope="module")
def facts(made: Path) -> CardFacts:
    manifest = read_manifest(CheckpointFolder(made))
    assert manifest is not None
    return CardFacts("org/llama", inspect_checkpoint(made), manifest, "org/base", "apache-2.0")


def front_matter(card: str) -> dict[str, object]:
    document: dict[str, object] = yaml.safe_load(card.split("---")[1])
    return document


def test_new_card(facts: CardFacts) -> None:
    card, warnings = write_card(None, facts)
    assert warnings == ()
    assert front_matter(card) == {
        "license": "apache-2.0",
        "base_model": "org/base",
        "base_model_relation": "quantized",
        "tags": ["espalier", "trellis-quantization"],
    }
    # Sizes and widths of llama-3.0-mcg: 3 bits, the 6-bit head padded from 320 to 384 inputs.
    for line in (
        "# llama",
        "Espalier checkpoint, format version 1, 2.63 MB of tensors in 1 shard.",
        "3.00 bits per weight in the decoder (3.052 with scales), 7.20 in the head.",
        "| attention | exl3-mcg@3 | 8 | 1,310,720 | 3.000 | 3.081 | 505 kB |",
        "| embeddings | F16 |  | 163,840 | 16.000 |  | 328 kB |",
        "hf download org/llama --local-dir llama",
    ):
        assert line in card.splitlines(), line
    assert "verify org/llama --remote" in card
    assert "verify llama --deep  # every file, and the decoded codes of 15 modules" in card
    assert write_card(card, facts) == (card, ())


def test_text_around_the_block_stays(facts: CardFacts) -> None:
    old = f"# Mine\n\nbefore \\1 \n\n{BEGIN}\nold numbers\n{END}\n\nafter\n"
    card, _ = write_card(old, facts)
    assert authors_text(card) == authors_text(old) == "# Mine\n\nbefore \\1 \n\n\n\nafter"
    assert "old numbers" not in card
    assert card.index("before") < card.index("bits per weight") < card.index("after")


def test_block_is_added_at_the_end(facts: CardFacts) -> None:
    card, _ = write_card("# Mine\n\ntext\n", facts)
    assert authors_text(card) == "# Mine\n\ntext"
    assert card.endswith(END + "\n")


def test_authors_metadata_wins(facts: CardFacts) -> None:
    text = "---\nlicense: mit\nbase_model: org/other\ntags:\n- mine\nlanguage: en\n---\n# Mine\n"
    card, warnings = write_card(text, facts)
    assert front_matter(card) == {
        "license": "mit",
        "base_model": "org/other",
        "tags": ["mine", "espalier", "trellis-quantization"],
        "language": "en",
        "base_model_relation": "quantized",
    }
    assert warnings == (
        "README.md keeps license: 'mit', not 'apache-2.0'",
        "README.md keeps base_model: 'org/other', not 'org/base'",
    )


def test_front_matter_is_left_alone_where_nothing_is_added(facts: CardFacts) -> None:
    """Comments, order and quotes, which a YAML writer would lose."""
    top = (
        "---\n# by hand\ntags: ['trellis-quantization', \"espalier\"]\nbase_model: org/base\n"
        "base_model_relation: quantized\nlicense:   apache-2.0\n---\n"
    )
    card, warnings = write_card(top + "# Mine\n", facts)
    assert card.startswith(top)
    assert warnings == ()


def test_line_ends_stay(facts: CardFacts) -> None:
    card, _ = write_card("---\r\nlicense: mit\r\n---\r\n# Mine\r\n", facts)
    assert card.count("\n") == card.count("\r\n") > 20


def test_what_is_not_known_is_not_written(made: Path) -> None:
    manifest = read_manifest(CheckpointFolder(made))
    assert manifest is not None
    report = inspect_checkpoint(made)
    card, warnings = write_card(None, CardFacts("org/llama", report, manifest))
    assert front_matter(card) == {"tags": ["espalier", "trellis-quantization"]}
    assert warnings == ("README.md states no base_model", "README.md states no license")
    stated = BaseModelReference(repo="org/base", license="mit")
    card, warnings = write_card(None, CardFacts("org/x", report, manifest.model_copy(update={"base_model": stated})))
    assert front_matter(card)["base_model"] == "org/base"
    assert front_matter(card)["license"] == "mit"
    assert warnings == ()


@pytest.mark.parametrize(
    "text",
    [
        "---\n- a\n---\n# Mine\n",
        "---\na: [\n---\n# Mine\n",
        f"{BEGIN}\n# Mine\n",
        f"# Mine\n{END}\n",
        f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n",
    ],
)
def test_damaged_card_is_refused(text: str, facts: CardFacts) -> None:
    with pytest.raises(SchemaError, match=r"README\.md"):
        write_card(text, facts)
