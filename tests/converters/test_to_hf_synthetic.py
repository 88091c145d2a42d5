"""To plain weights what no fixture has: slices, legacy signs, other grids, mixed dtypes; and what is refused.

Everything that is refused must leave the destination as it was.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from builders import (
    Draft,
    Exl3Module,
    Module,
    Tensor,
    bf16,
    espalier_draft,
    exl3_draft,
    llama_config,
    llama_modules,
    read_safetensors,
)
from hf_models import cast, reference_weight, rounded

from espalier_format.checkpoint import open_checkpoint
from espalier_format.codec.codebook import get_codebook
from espalier_format.converters.to_hf import to_hf
from espalier_format.errors import (
    EspalierError,
    MissingFileError,
    NonFiniteScaleError,
    ScaleOverflowError,
    SourceError,
    UnknownSizeError,
    UsageError,
)
from espalier_format.kernels import reference

if TYPE_CHECKING:
    from pathlib import Path

    from espalier_format.converters.hf_config import DtypeChoice

CONFIG = llama_config(dtype="bfloat16")
MODULES = [Exl3Module(*shape) for shape in llama_modules()]


def convert(draft: Draft, folder: Path, dtype: DtypeChoice = "source") -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Write the draft, convert it; return (tensors, warnings)."""
    with open_checkpoint(draft.write(folder / "source")) as checkpoint:
        report = to_hf(checkpoint, folder / "hf", dtype=dtype)
    return read_safetensors(folder / "hf" / "model.safetensors")[0], report.warnings


def refused(
    draft: Draft, folder: Path, kind: type[EspalierError], match: str, dtype: DtypeChoice = "source", **options: Any
) -> EspalierError:
    """Convert into a missing folder, which must be missing still after the refusal; return the error."""
    with (
        open_checkpoint(draft.write(folder / "source")) as checkpoint,
        pytest.raises(kind, match=match) as refusal,
    ):
        to_hf(checkpoint, folder / "made" / "hf", dtype=dtype, **options)
    assert sorted(path.name for path in folder.iterdir()) == ["source"]
    return refusal.value


def test_slices_of_a_wide_mlp_are_joined(tmp_path: Path) -> None:
    """The last slice has what is left, so it alone is padded; nothing of the padding may come between the slices."""
    mlp = "model.layers.0.mlp"
    slices: dict[str, list[Exl3Module]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for number, size in enumerate((128, 128, 64)):
        slices["gate_proj"].append(Exl3Module(f"{mlp}.gate_proj.slice.{number}", 192, size, 2, "mcg"))
        slices["up_proj"].append(Exl3Module(f"{mlp}.up_proj.slice.{number}", 192, size, 3, "mul1"))
        slices["down_proj"].append(Exl3Module(f"{mlp}.down_proj.slice.{number}", size, 192, 4, None))
    whole = [module for module in MODULES if ".mlp." not in module.name]
    draft = exl3_draft([*whole, *(part for parts in slices.values() for part in parts)], config=CONFIG)
    written, warnings = convert(draft, tmp_path)
    assert warnings == ()
    assert not [name for name in written if ".slice." in name]
    for name, parts in slices.items():
        weights = [reference_weight(draft, part) for part in parts]
        joined = np.concatenate(weights, axis=1 if name == "down_proj" else 0)
        assert joined.shape == ((192, 320) if name == "down_proj" else (320, 192))
        assert written[f"{mlp}.{name}.weight"] == rounded(joined, "BF16")


def test_legacy_signs_and_biases_of_every_form(tmp_path: Path) -> None:
    names = [shape[0] for shape in llama_modules()]
    modules = [
        Exl3Module(*shape, packed_su=n % 2 == 0, packed_sv=n % 3 == 0, bias=bias, unpadded_bias=n > 3)
        for n, (shape, bias) in enumerate(
            zip(llama_modules(), ("F16", "BF16", "F32", None, "F16", "F32", None), strict=True)
        )
    ]
    draft = exl3_draft(modules, config=CONFIG)
    written, _ = convert(draft, tmp_path)
    for module in modules:
        trellis = draft[f"{module.name}.trellis"].array()
        suh = signs(draft, f"{module.name}.su", packed=module.packed_su)
        svh = signs(draft, f"{module.name}.sv", packed=module.packed_sv)
        weight = reference.decode_weight(trellis, suh, svh, get_codebook("exl3-mcg@2"), 128, 128)
        cropped = weight[: module.in_features, : module.out_features].T
        assert written[f"{module.name}.weight"] == rounded(cropped, "BF16")
        if module.bias is None:
            assert f"{module.name}.bias" not in written
            continue
        stored = draft[f"{module.name}.bias"]
        values = Tensor.of(stored.array()[: module.out_features], stored.dtype)
        assert written[f"{module.name}.bias"] == cast(values, "BF16")
    assert written[f"{names[2]}.bias"].dtype == "F32"
    assert any(
        len(draft[f"{module.name}.bias"].data) > len(written[f"{module.name}.bias"].data) for module in modules[:3]
    )


def signs(draft: Draft, key: str, *, packed: bool) -> np.ndarray:
    """The scale vector ``key``h, or what packed signs mean: bit b of word w is element 16w + b, 1 is negative."""
    if not packed:
        return draft[f"{key}h"].array()
    bits = np.unpackbits(draft[key].array().view(np.uint8), bitorder="little")
    return (1.0 - 2.0 * bits).astype(np.float16)


PLAIN = {
    "model.layers.0.linear_attn.A_log": Tensor.of([1.1, -2.5], "F32"),
    "model.layers.0.mlp.gate.e_score_correction_bias": Tensor.of([0.1], "F64"),
    "model.layers.0.self_attn.q_norm.weight": bf16([1.5, 3.0e-6, -0.0]),
    "model.layers.0.mlp.gate.weight": Tensor.of([[1.0009765625, 6.0e-8]], "F16"),
    "model.layers.0.counter": Tensor.of(7, "I64"),
    "model.layers.0.table": Tensor.of([[1, 2], [3, 4]], "U8"),
    "model.layers.0.empty": Tensor.of(np.zeros((0, 4)), "F16"),
    "model.layers.0.scalar": Tensor.of(0.5, "F16"),
}


@pytest.mark.parametrize(("dtype", "stored"), [("source", "BF16"), ("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")])
def test_plain_tensors_of_sixteen_bits_follow_the_dtype_and_no_others(
    dtype: DtypeChoice, stored: str, tmp_path: Path
) -> None:
    written, _ = convert(exl3_draft(MODULES, PLAIN, config=CONFIG), tmp_path, dtype)
    for name, tensor in PLAIN.items():
        assert written[name] == cast(tensor, stored)
    kept = {name: tensor.dtype for name, tensor in PLAIN.items() if written[name] == tensor}
    assert {dtype for dtype in kept.values() if dtype not in ("F16", "BF16")} == {"F32", "F64", "I64", "U8"}


def test_joined_parts_of_different_dtypes_are_widened(tmp_path: Path) -> None:
    """A bias stored as F32 keeps its precision, so the joined bias is F32."""
    parent = "model.layers.0.self_attn"
    modules = [
        Exl3Module(f"{parent}.{p}_proj", 192, 64, bias=b) for p, b in zip("qkv", ("F32", "F16", "BF16"), strict=True)
    ]
    config = llama_config(heads=1, model_type="phi3", dtype="bfloat16")
    draft = exl3_draft(modules, config=config)
    written, _ = convert(draft, tmp_path)
    parts = [draft[f"{module.name}.bias"].array()[:64] for module in modules]
    parts[2] = (parts[2].astype(np.uint32) << 16).view(np.float32)
    joined = written[f"{parent}.qkv_proj.bias"]
    assert joined.dtype == "F32"
    assert joined.array().tolist() == np.concatenate(parts, dtype=np.float32).tolist()


ESPALIER_MODULES = (
    Module("model.layers.0.self_attn.q_proj", 96, 64, "int6@4", (32, 64), bias="BF16"),
    Module("model.layers.0.self_attn.o_proj", 64, 90, "e2m1@1.5", (64, 0)),
    Module("model.layers.0.mlp.up_proj", 96, 40, "int5@2.5", (0, 32)),
    Module("lm_head", 96, 300, "int8@6", (32, 256)),
)


def test_hardware_grids_and_other_rotations(tmp_path: Path) -> None:
    draft = espalier_draft(ESPALIER_MODULES, (), config={"model_type": "llama", "dtype": "float16"})
    written, warnings = convert(draft, tmp_path)
    assert warnings == ()
    for module in ESPALIER_MODULES:
        arrays = (draft[f"{module.name}.esp_{kind}"].array() for kind in ("trellis", "suh", "svh"))
        weight = reference.decode_weight(*arrays, get_codebook(module.codebook), *module.rotation)
        cropped = weight[: module.in_features, : module.out_features].T
        assert written[f"{module.name}.weight"] == rounded(cropped, "F16")


def test_unknown_architecture_with_exact_sizes_warns_and_keeps_names(tmp_path: Path) -> None:
    draft = espalier_draft(ESPALIER_MODULES, (), config={"model_type": "brand_new"})
    written, warnings = convert(draft, tmp_path)
    assert {f"{module.name}.weight" for module in ESPALIER_MODULES} < written.keys()
    assert len(warnings) == 1
    assert "brand_new" in warnings[0]


def test_tied_config_is_untied_only_where_a_head_is_written(tmp_path: Path) -> None:
    tied = llama_config(tie_word_embeddings=True, text_config=None)
    for name, modules in (("head", [*MODULES, Exl3Module("lm_head", 192, 90)]), ("none", MODULES)):
        convert(exl3_draft(modules, config=tied), tmp_path / name)
        config = json.loads((tmp_path / name / "hf" / "config.json").read_text())
        assert config["tie_word_embeddings"] is (name == "none")
    plain_head = exl3_draft(MODULES, {"lm_head.weight": bf16(np.ones((90, 192)))}, config=tied)
    convert(plain_head, tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "hf" / "config.json").read_text())["tie_word_embeddings"] is False


def test_config_keeps_its_layout(tmp_path: Path) -> None:
    draft = exl3_draft(MODULES, config={"note": "é", **CONFIG})
    source = draft.write(tmp_path / "source")
    text = json.dumps(draft.config, indent=4, ensure_ascii=False) + "\n\n"
    (source / "config.json").write_text(text, encoding="utf-8")
    with open_checkpoint(source) as checkpoint:
        to_hf(checkpoint, tmp_path / "hf")
    expected = {key: value for key, value in (draft.config or {}).items() if key != "quantization_config"}
    again = json.dumps(expected, indent=4, ensure_ascii=False) + "\n\n"
    assert (tmp_path / "hf" / "config.json").read_bytes() == again.encode()


def test_unknown_size_error_names_modules_and_reason_before_anything_is_written(tmp_path: Path) -> None:
    draft = exl3_draft(MODULES, config={**CONFIG, "model_type": "brand_new"})
    error = refused(draft, tmp_path, UnknownSizeError, r"q_proj.*and 4 more.*brand_new is not in the table")
    assert error.code == "unknown-size"


@pytest.mark.parametrize("kind", ["svh", "bias"])
def test_unknown_size_error_for_values_beyond_the_stated_size(kind: str, tmp_path: Path) -> None:
    """A config.json of too small sizes must not cut off outputs: newer files have zeros in the whole padding."""
    name = "model.layers.0.self_attn.k_proj"
    modules = [Exl3Module(name, 192, 64, bias="F16")]
    draft = exl3_draft(modules, config=CONFIG)
    for part, value in (("svh", 0.0), ("bias", 0.0)):
        values = draft[f"{name}.{part}"].array().copy()
        values[64:] = value
        draft[f"{name}.{part}"] = Tensor.of(values, "F16")
    convert(draft, tmp_path / "right")
    values = draft[f"{name}.{kind}"].array().copy()
    values[65] = 1
    draft[f"{name}.{kind}"] = Tensor.of(values, "F16")
    error = refused(draft, tmp_path / "wrong", UnknownSizeError, f"the {kind} of {name} is not zero beyond")
    assert error.tensor == name


@pytest.mark.parametrize("kinds", [("svh", "bias"), ("bias", "svh")])
def test_unknown_size_error_of_several_modules_is_about_the_first(kinds: tuple[str, str], tmp_path: Path) -> None:
    """The reason is that of the module that is named, not of another."""
    names = [f"model.layers.{layer}.self_attn.k_proj" for layer in range(2)]
    draft = exl3_draft([Exl3Module(name, 192, 64, bias="F16") for name in names], config=CONFIG)
    for name, kind in zip(names, kinds, strict=True):
        for part in ("svh", "bias"):
            values = draft[f"{name}.{part}"].array().copy()
            values[64:] = 0
            values[65] = part == kind
            draft[f"{name}.{part}"] = Tensor.of(values, "F16")
    error = refused(draft, tmp_path, UnknownSizeError, f"the {kinds[0]} of {names[0]} is not zero .* of 1 more")
    assert error.tensor == names[0]


def test_unknown_size_error_where_plain_tensors_contradict_config_json(tmp_path: Path) -> None:
    draft = exl3_draft(MODULES, config=CONFIG)
    assert draft.config is not None
    draft.config["hidden_size"] = 190
    refused(draft, tmp_path, UnknownSizeError, r"hidden_size is 190, but \S+ has 192")


@pytest.mark.parametrize(
    ("parts", "dtype", "complaint"),
    [
        (["mlp.down_proj.slice.0", "mlp.down_proj.slice.1"], "I32", "I32"),
        (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "U8", "U8"),
    ],
)
def test_source_error_for_integers_to_join(parts: list[str], dtype: str, complaint: str, tmp_path: Path) -> None:
    plain = {f"model.layers.0.{part}.weight": Tensor.of(np.ones((4, 6)), dtype) for part in parts}
    config = llama_config(model_type="phi3", dtype="bfloat16")
    draft = exl3_draft([Exl3Module("lm_head", 192, 90)], plain, config=config)
    refused(draft, tmp_path, SourceError, f"cannot be joined: they are {complaint}")


def test_scale_overflow_error_names_the_module(tmp_path: Path) -> None:
    draft = exl3_draft(MODULES, config=CONFIG)
    name = f"{MODULES[3].name}.suh"
    draft[name] = Tensor.of(draft[name].array() * np.float16(40000), "F16")
    assert refused(draft, tmp_path, ScaleOverflowError, "float16", "fp16").tensor == MODULES[3].name
    convert(draft, tmp_path, "bf16")


def test_scale_overflow_error_of_a_plain_tensor(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    draft = exl3_draft(MODULES, {name: bf16([1.0, 1.0e6])}, config=CONFIG)
    assert refused(draft, tmp_path, ScaleOverflowError, "too large for F16", "fp16").tensor == name


def test_non_finite_scale_error(tmp_path: Path) -> None:
    draft = exl3_draft(MODULES, config=CONFIG)
    draft[f"{MODULES[1].name}.svh"].array()  # exists
    scales = draft[f"{MODULES[1].name}.svh"].array().copy()
    scales[-1] = np.nan
    draft[f"{MODULES[1].name}.svh"] = Tensor.of(scales, "F16")
    assert refused(draft, tmp_path, NonFiniteScaleError, "nan").tensor == f"{MODULES[1].name}.svh"


def test_baked_in_scale_is_refused_before_unknown_sizes(tmp_path: Path) -> None:
    module = Exl3Module("model.layers.1.mlp.experts.0.up_proj", 192, 128)
    draft = exl3_draft([module], config={**CONFIG, "model_type": "laguna"})
    refused(draft, tmp_path, SourceError, r"laguna.*1/128 on routed up_proj")


def test_row_table_is_refused(tmp_path: Path) -> None:
    table = {
        "model.embed_tokens.trellis": Tensor.of(np.zeros((90, 33)), "I16"),
        "model.embed_tokens.signs": Tensor.of(np.ones((1, 256)), "F16"),
    }
    refused(exl3_draft(MODULES, table, config=CONFIG), tmp_path, SourceError, "embed_tokens.trellis: a row table")


def test_missing_config_is_refused(tmp_path: Path) -> None:
    draft = exl3_draft(MODULES, config=CONFIG)
    draft.config = None
    refused(draft, tmp_path, MissingFileError, re.escape("config.json"))


def test_plain_checkpoint_is_refused(tmp_path: Path) -> None:
    draft = Draft(dict(CONFIG), {"model.safetensors": {"model.norm.weight": bf16([1.0])}})
    refused(draft, tmp_path, SourceError, "not quantized")


def test_stated_dtype_that_is_not_written_is_refused(tmp_path: Path) -> None:
    draft = exl3_draft(MODULES, config={**CONFIG, "dtype": "float8_e4m3fn"})
    refused(draft, tmp_path, SourceError, "float8_e4m3fn")


def test_impossible_shard_limit_is_refused(tmp_path: Path) -> None:
    refused(exl3_draft(MODULES, config=CONFIG), tmp_path, UsageError, "shard limit", max_shard_bytes=0)


def test_quantized_part_is_not_joined_with_a_double(tmp_path: Path) -> None:
    parent = "model.layers.0.self_attn"
    modules = [Exl3Module(f"{parent}.{part}_proj", 192, 64) for part in "qk"]
    plain = {f"{parent}.v_proj.weight": Tensor.of(np.ones((64, 192)), "F64")}
    config = llama_config(heads=1, model_type="phi3")
    refused(exl3_draft(modules, plain, config=config), tmp_path, SourceError, "cannot be joined: they are BF16, F64")
