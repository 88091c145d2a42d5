"""The JSON Schemas in ``spec/``, generated from the models.

``python -m espalier_format.schema.json_schema`` writes them into the repository's ``spec`` folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from espalier_format.codec.codebook import CODEBOOKS
from espalier_format.schema.config import QuantizationConfig
from espalier_format.schema.manifest import Manifest
from espalier_format.spec import CONFIG_SCHEMA, MANIFEST_SCHEMA

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of the ``quantization_config`` block.

    A document that the schema takes may still be refused: rules between fields (``spec/config.md``) are
    beyond a schema.
    """
    schema = _finished(
        QuantizationConfig.model_json_schema(by_alias=True),
        CONFIG_SCHEMA,
        "Espalier quantization_config, version 1",
    )
    names = list(CODEBOOKS)
    definitions = schema["$defs"]
    schema["properties"]["codebooks"]["propertyNames"] = {"enum": names}
    definitions["ModuleSpec"]["properties"]["codebook"]["enum"] = names
    definitions["Projection"]["properties"]["codebooks"]["items"]["enum"] = names
    return schema


def manifest_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``espalier_manifest.json``."""
    return _finished(Manifest.model_json_schema(by_alias=True), MANIFEST_SCHEMA, "Espalier manifest, version 1")


def schema_documents() -> dict[str, str]:
    """Return file name → text of both schemas, as they stand in ``spec/``.

    The text depends on the release of pydantic: what is shipped was made with the one in constraints.txt.
    """
    return {
        name: json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        for name, schema in ((CONFIG_SCHEMA, config_schema()), (MANIFEST_SCHEMA, manifest_schema()))
    }


def main(folder: Path) -> None:
    """Write both schemas into ``folder``."""
    for name, text in schema_documents().items():
        (folder / name).write_text(text, encoding="utf-8")


def _finished(schema: dict[str, Any], name: str, title: str) -> dict[str, Any]:
    """Put dialect, id and title in front of a schema made by pydantic."""
    body = {key: _closed(value) for key, value in schema.items() if key != "title"}
    return {"$schema": DIALECT, "$id": name, "title": title, **body}


def _closed(node: Any) -> Any:
    """Drop titles, which only repeat names, and refuse keys that fit none of an object's patterns."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    # A property that is called "title" has an object there, a title has a string.
    closed = {key: _closed(value) for key, value in node.items() if not (key == "title" and isinstance(value, str))}
    if "default" in closed and closed["default"] is None and {"type": "null"} not in closed.get("anyOf", ()):
        del closed["default"]  # of a field that may be left out, but not be null
    return {**closed, "additionalProperties": False} if "patternProperties" in closed else closed


if __name__ == "__main__":
    import espalier_format.spec

    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(espalier_format.spec.__file__).resolve().parent)
