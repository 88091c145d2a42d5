"""The form of the pages: status, words of obligation, links, and that code cites sections that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import PAGES, SPEC, flat, sections, table, text

import espalier_format
from espalier_format import spec
from espalier_format.errors import MissingFileError

NORMATIVE = sorted(set(PAGES) - {"README.md", "CHANGELOG.md", "encoding.md", "rationale.md"})
OBLIGATIONS = r"\b(MUST(?: NOT)?|REQUIRED|SHALL(?: NOT)?|SHOULD(?: NOT)?|(?:NOT )?RECOMMENDED|MAY|OPTIONAL)\b"
ROOT = Path(espalier_format.__file__).resolve().parents[1]
VERSION = "1.0"


@pytest.mark.parametrize("page", PAGES)
def test_head_of_a_page(page: str) -> None:
    kind = "normative, stable" if page in NORMATIVE else "informative"
    lines = text(page).splitlines()
    assert re.fullmatch(r"# \S.*", lines[0])
    assert lines[1] == ""
    assert lines[2:4] == [
        (
            f"**Status:** {kind}, version {VERSION} of the text for format version 1. "
            "**Editors:** the espalier-format authors."
        ),
        "**Changes:** [CHANGELOG.md](CHANGELOG.md).",
    ]


def test_changelog_has_the_version_of_the_pages() -> None:
    assert re.search(r"^## ([0-9.]+)$", text("CHANGELOG.md"), re.MULTILINE)[1] == VERSION


@pytest.mark.parametrize("page", sorted(set(PAGES) - {"CHANGELOG.md"}))
def test_sections_are_numbered_without_gaps(page: str) -> None:
    headings = re.findall(r"^(##+) (.*)$", text(page), re.MULTILINE)
    numbers = [re.match(r"[0-9]+(?:\.[0-9]+)*", title) for _, title in headings]
    assert all(numbers), page
    tops = [int(n[0]) for n, (level, _) in zip(numbers, headings, strict=True) if level == "##"]
    assert tops == list(range(1, len(tops) + 1))
    assert len(sections(page)) == len(headings)


def test_words_of_obligation() -> None:
    """They stand in capitals on normative pages only; the page that defines them lists all that are used."""
    defined = set(re.findall(OBLIGATIONS, sections("espalier-v1.md")["2"].partition("are to be read")[0]))
    used = {word for page in NORMATIVE for word in re.findall(OBLIGATIONS, text(page))}
    assert used <= defined
    assert {"MUST", "MUST NOT", "SHOULD", "MAY"} <= used
    for page in set(PAGES) - set(NORMATIVE):
        assert not re.findall(OBLIGATIONS, text(page)), page
    for page in NORMATIVE:
        for body in re.findall(r"^##+ [^\n]*\(informative\)\n(.*?)(?=^## |\Z)", text(page), re.DOTALL | re.MULTILINE):
            assert not re.findall(OBLIGATIONS, body), page


@pytest.mark.parametrize("page", PAGES)
def test_links_and_references_lead_somewhere(page: str) -> None:
    body = text(page)
    for target in re.findall(r"\]\(([^)]+)\)", body):
        assert (SPEC / target).exists(), target
    for name in re.findall(r"`((?:vectors/)?[a-z0-9.-]+\.(?:md|json))`", body):
        others = {
            "config.json",
            "model.safetensors.index.json",
            "espalier_manifest.json",
            "quantization_config.json",
            *(f"{kind}.json" for kind in ("open", "codes", "weights", "load", "matmul", "experts")),  # of the kit
        }
        inside = (SPEC / name).exists() or (SPEC / "vectors" / name).exists()
        assert inside or name in others, name
    for name, number in re.findall(r"`([a-z0-9-]+\.md)` §([0-9]+(?:\.[0-9]+)*)", flat(body)):
        assert number in sections(name), (name, number)
    own = re.sub(r"`(?:spec/)?[a-z0-9-]+\.md`? §[0-9.]+(?: (?:to|and) §[0-9.]+)?", "", flat(body)).replace(
        "§10 of `espalier-v1.md`", ""
    )
    for number in re.findall(r"§([0-9]+(?:\.[0-9]+)*)", own):
        assert number in sections(page), number


def test_index_page_lists_all_files() -> None:
    listed = set(re.findall(r"\]\(([^)]+)\)", sections("README.md")["1"]))
    present = {p.name for p in SPEC.iterdir() if p.suffix in {".md", ".json"}} - {"README.md"} | {"vectors/"}
    assert listed == present
    for name, _, status in table("README.md", "1"):
        page = re.search(r"\((.*)\)", name)[1]
        assert (page in NORMATIVE) == (status == "normative"), page


def test_code_cites_sections_that_exist() -> None:
    found = 0
    for folder in ("espalier_format", "converters", "kernels", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for name, number in re.findall(
                r"spec/([a-z0-9-]+\.md)`{0,2}(?: §([0-9]+(?:\.[0-9]+)*))?", path.read_text("utf-8")
            ):
                assert name in PAGES, f"{path}: spec/{name}"
                assert not number or number in sections(name), f"{path}: spec/{name} §{number}"
                found += 1
    assert found > 20


def test_lines_are_short() -> None:
    for page in PAGES:
        for line in text(page).splitlines():
            assert len(line) <= 120 or line.startswith(("|", "    ", "vision ")), (page, line)


def test_access_to_the_files() -> None:
    names = spec.names()
    assert list(names) == sorted(names)
    on_disk = {p.relative_to(SPEC).as_posix() for p in SPEC.rglob("*") if p.suffix in {".md", ".json"}}
    assert set(names) == on_disk
    assert spec.read_text("packing.md") == text("packing.md")
    assert spec.read_text("vectors/signs.json") == (SPEC / "vectors/signs.json").read_text("utf-8")


@pytest.mark.parametrize("name", ["absent.md", "../pyproject.toml", "__init__.py", "vectors", "/etc/hostname", ""])
def test_access_to_other_files_is_refused(name: str) -> None:
    with pytest.raises(MissingFileError):
        spec.read_text(name)
