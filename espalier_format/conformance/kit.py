"""The kit as files for programs in any language: safetensors, and JSON that says what they mean.

Everything follows from labels and hashes, so each file is the same, byte for byte, wherever it is made: their SHA-256
are in ``spec/vectors/kit.json`` (spec/conformance.md §9).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import get_codebook
from espalier_format.codec.rounding import OutputDtype
from espalier_format.conformance.bank_cases import bank_cases
from espalier_format.conformance.checkpoint_files import checkpoint_files
from espalier_format.conformance.checkpoints import kit_checkpoints
from espalier_format.conformance.code_cases import code_cases
from espalier_format.conformance.module_case import DTYPES, ModuleCase
from espalier_format.conformance.modules import weight_modules
from espalier_format.conformance.outcome import LEVELS, Kind
from espalier_format.conformance.products import product_cases
from espalier_format.conformance.refusals import load_refusals, refusal_cases
from espalier_format.conformance.stored import StoredTensor, safetensors_bytes
from espalier_format.conformance.tolerance import LARGEST_VALUE, PRODUCT, WEIGHT, Allowance
from espalier_format.kernels.digest import decode_digest
from espalier_format.spec import read_text

KIT_VERSION: Final = 1
KIT_FILE: Final = "kit.json"


class _Group(NamedTuple):
    """One kind of cases: the head of its JSON, its cases, its tensors."""

    head: dict[str, Any]
    cases: list[dict[str, Any]]
    tensors: dict[str, StoredTensor]


def kit_files() -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of the kit, `KIT_FILE` with the hashes of all others last.

    Names have ``/`` between folders. At most one group is in memory at a time, about 40 MB.
    """
    hashes: dict[str, str] = {}
    groups = []
    for name, data in _all_files():
        hashes[name] = sha256(data).hexdigest()
        if name.endswith(".json") and "/" not in name:
            groups.append(name)
        yield name, data
    yield KIT_FILE, kit_document(groups, hashes)


def pinned_hashes() -> Mapping[str, str]:
    """Return the SHA-256 of every file of the kit, as the specification states them."""
    files: dict[str, str] = json.loads(read_text(f"vectors/{KIT_FILE}"))["files"]
    return files


def kit_document(groups: list[str], hashes: Mapping[str, str]) -> bytes:
    """Return the content of `KIT_FILE`."""
    about = "Every file of the conformance kit and its SHA-256; groups are those to begin with (spec/conformance.md)."
    head = {"about": about, "kit_version": KIT_VERSION, "format_version": 1, "groups": groups}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    body = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(hashes.items()))
    return ("{\n" + ",\n".join([*lines, f'  "files": {{\n{body}\n  }}']) + "\n}\n").encode("ascii")


def _all_files() -> Iterator[tuple[str, bytes]]:
    for kind, build in _GROUPS.items():
        group = build()
        if group.tensors:
            group.head["file"] = f"{kind}.safetensors"
            yield f"{kind}.safetensors", safetensors_bytes(group.tensors)
        yield f"{kind}.json", _group_document(kind, group)
    for checkpoint in kit_checkpoints():
        for name, data in checkpoint_files(checkpoint).items():
            yield f"checkpoints/{checkpoint.name}/{name}", data
    for refusal in refusal_cases():
        for name, data in refusal.files.items():
            yield f"refused/{refusal.name}/{name}", data


def _group_document(kind: Kind, group: _Group) -> bytes:
    head = {"kind": kind, "level": LEVELS[kind], **group.head}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    body = ",\n".join(f"    {json.dumps(case)}" for case in group.cases)
    return ("{\n" + ",\n".join([*lines, f'  "cases": [\n{body}\n  ]']) + "\n}\n").encode("ascii")


def _open() -> _Group:
    about = "Checkpoints to be opened: error is null where they are valid, else the code of the refusal."
    cases: list[dict[str, Any]] = [
        {
            "name": f"valid/{checkpoint.name}",
            "folder": f"checkpoints/{checkpoint.name}",
            "error": None,
            "operation": "verify --deep",
            "reader": "espalier",
        }
        for checkpoint in kit_checkpoints()
    ]
    for refusal in refusal_cases():
        folder = f"refused/{refusal.name}"
        case = {"name": folder, "folder": folder, "error": refusal.code, "operation": refusal.operation}
        cases.append({**case, "reader": refusal.reader, "why": refusal.why})
    return _Group({"about": about}, cases, {})


def _codes() -> _Group:
    about = "Trellises and their codes: of each codebook one that visits all 65,536 states; error: must be refused."
    cases: list[dict[str, Any]] = []
    tensors: dict[str, StoredTensor] = {}
    for case in code_cases():
        names = {"trellis": f"{case.label}.trellis"}
        tensors[names["trellis"]] = StoredTensor.of("I16", case.trellis())
        entry: dict[str, Any] = {"name": case.label, "codebook": case.codebook, "error": case.error, "tensors": names}
        if case.error is None:
            codes = case.codes()
            names["codes"] = f"{case.label}.codes"
            tensors[names["codes"]] = StoredTensor.of("I8" if codes.dtype == np.int8 else "F16", codes)
            entry["decode_digest"] = _digest(case.trellis(), case.codebook)
        cases.append(entry)
    return _Group({"about": about}, cases, tensors)


def _weights() -> _Group:
    about = "Modules and their weights, (out_features, in_features); sha256: of the correctly rounded ones."
    cases: list[dict[str, Any]] = []
    tensors: dict[str, StoredTensor] = {}
    for module in weight_modules():
        names = _module_tensors(module, tensors)
        if len(module.refused) < len(DTYPES):
            names["weight"] = f"{module.label}.weight"
            tensors[names["weight"]] = StoredTensor.of("F64", module.weight())
        cases.append({"name": module.label, **_description(module), "tensors": names, "refused": module.refused})
    return _Group({"about": about, **_tolerance(WEIGHT)}, cases, tensors)


def _load() -> _Group:
    about = "Modules of the checkpoints and their weights, as in weights.json."
    cases: list[dict[str, Any]] = []
    tensors: dict[str, StoredTensor] = {}
    for checkpoint in kit_checkpoints():
        for name, module in checkpoint.all_modules().items():
            label = f"{checkpoint.name}/{name}"
            tensors[f"{label}.weight"] = StoredTensor.of("F64", module.weight())
            place = {"name": label, "folder": f"checkpoints/{checkpoint.name}", "module": name}
            tail = {"tensors": {"weight": f"{label}.weight"}, "refused": module.refused}
            cases.append({**place, **_description(module), **tail})
    for refusal, name in load_refusals():
        label = f"refused/{refusal.name}"
        cases.append({"name": label, "folder": label, "module": name, "refused": dict.fromkeys(DTYPES, refusal.code)})
    return _Group({"about": about, **_tolerance(WEIGHT)}, cases, tensors)


def _matmul() -> _Group:
    about = "Products y = x W^T + bias; x and bias are exact in each of the dtypes of the case."
    cases: list[dict[str, Any]] = []
    tensors: dict[str, StoredTensor] = {}
    for product in product_cases():
        module, operands = product.module, product.operands()
        names = _module_tensors(module, tensors)
        for key, dtype, array in (("x", "F32", operands.x), ("bias", "F32", operands.bias)):
            if array is not None:
                names[key] = f"{product.label}.{key}"
                tensors[names[key]] = StoredTensor.of(dtype, array)
        names["y"] = f"{product.label}.y"
        tensors[names["y"]] = StoredTensor.of("F64", operands.product)
        case = {"name": product.label, **_description(module, hashes=False), "rows": product.rows}
        cases.append({**case, "dtypes": product.dtypes, "tensors": names})
    return _Group({"about": about, **_tolerance(PRODUCT)}, cases, tensors)


def _experts() -> _Group:
    about = "Expert banks: y = sum of w * down(silu(gate(x)) * up(x)); bound: how far y may be off in a dtype."
    cases: list[dict[str, Any]] = []
    tensors: dict[str, StoredTensor] = {}
    for case in bank_cases():
        operands = case.operands()
        arrays: dict[str, tuple[str, NDArray[Any]]] = {
            "x": ("F32", operands.x),
            "expert_ids": ("I64", operands.expert_ids),
            "expert_weights": ("F32", operands.expert_weights),
            "y": ("F64", operands.y),
            **{f"bound_{dtype}": ("F64", operands.bounds[dtype]) for dtype in DTYPES},
        }
        names = {key: f"{case.label}.{key}" for key in arrays}
        for key, (dtype, array) in arrays.items():
            tensors[names[key]] = StoredTensor.of(dtype, array)
        place = {"name": case.label, "folder": f"checkpoints/{case.checkpoint.name}", "bank": case.bank.name}
        cases.append({**place, "rows": case.tokens, "dtypes": DTYPES, "tensors": names})
    return _Group({"about": about}, cases, tensors)


_GROUPS: Final[dict[Kind, Callable[[], _Group]]] = {
    "open": _open,
    "codes": _codes,
    "weights": _weights,
    "load": _load,
    "matmul": _matmul,
    "experts": _experts,
}


def _module_tensors(module: ModuleCase, tensors: dict[str, StoredTensor]) -> dict[str, str]:
    held = module.tensors()
    names = {key: f"{module.label}.{key}" for key in ("trellis", "suh", "svh")}
    tensors[names["trellis"]] = StoredTensor.of("I16", held.trellis)
    tensors[names["suh"]] = StoredTensor.of("F16", held.suh)
    tensors[names["svh"]] = StoredTensor.of("F16", held.svh)
    return names


def _description(module: ModuleCase, *, hashes: bool = True) -> dict[str, Any]:
    described: dict[str, Any] = {
        "codebook": module.codebook,
        "rotation": {"in": module.rotation_in, "out": module.rotation_out},
        "in_features": module.in_features,
        "out_features": module.out_features,
    }
    if hashes:
        described["decode_digest"] = _digest(module.tensors().trellis, module.codebook)
        described["sha256"] = {
            dtype: sha256(_little_endian(module, dtype)).hexdigest() for dtype in DTYPES if dtype not in module.refused
        }
    return described


def _little_endian(module: ModuleCase, dtype: OutputDtype) -> bytes:
    patterns = np.ascontiguousarray(module.rounded(dtype))
    return patterns.view("<u4" if dtype == "float32" else "<u2").tobytes()


def _digest(trellis: NDArray[np.int16], codebook: str) -> str:
    return decode_digest(trellis, get_codebook(codebook))


def _tolerance(allowed: Mapping[OutputDtype, Allowance]) -> dict[str, Any]:
    return {"tolerance": {dtype: terms._asdict() for dtype, terms in allowed.items()}, "largest_value": LARGEST_VALUE}
