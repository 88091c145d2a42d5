"""Build small synthetic checkpoints, Espalier and EXL3, without any code of the package.

Everything is made with json, struct and numpy from the specification, so that tests which read these
checkpoints check the package against something independent of its writer. A builder returns a ``Draft``,
which a test may spoil before ``write``. All content follows from ``seed``.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Decimal
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MARKERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
_NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "U8": "u1",
    "I8": "i1",
}
_GRIDS = json.loads((Path(__file__).resolve().parent.parent / "spec" / "grids.json").read_text(encoding="utf-8"))


@dataclass
class Tensor:
    """A stored tensor: safetensors dtype, shape and little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: Any, dtype: str) -> Tensor:
        """Store an array; BF16 is given as its uint16 bit patterns."""
        array = np.ascontiguousarray(array, dtype=_NUMPY[dtype])
        return cls(dtype, np.shape(array), array.tobytes())

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, _NUMPY[self.dtype]).reshape(self.shape)


def bf16(values: Any) -> Tensor:
    """Store float32 values, cut off to BF16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(np.shape(values))
    return Tensor.of(bits >> 16, "BF16")


def safetensors_bytes(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, pad: bool = True
) -> bytes:
    """Serialise one file; without ``pad`` and metadata as exllamav3 does it."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    if pad:
        text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values())


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """Read one file: (tensors in header order, metadata)."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", None)
    return {
        name: Tensor(entry["dtype"], tuple(entry["shape"]), data[start:][slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }, metadata


@dataclass
class Draft:
    """A checkpoint that is not written yet: change what you like, then ``write``.

    ``index`` "auto" writes the right index (None: none, a dict: that). ``files`` are further files.
    """

    config: dict[str, Any] | None
    shards: dict[str, dict[str, Tensor]]
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    index: Any = "auto"
    files: dict[str, bytes] = field(default_factory=dict)
    pad: bool = True

    @property
    def block(self) -> dict[str, Any]:
        """quantization_config."""
        assert self.config is not None
        block: dict[str, Any] = self.config["quantization_config"]
        return block

    def shard_of(self, name: str) -> dict[str, Tensor]:
        return next(tensors for tensors in self.shards.values() if name in tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self.shard_of(name)[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        """Replace a tensor, or add one to the last shard."""
        holder = [tensors for tensors in self.shards.values() if name in tensors]
        (holder or list(self.shards.values()))[-1][name] = tensor

    def __delitem__(self, name: str) -> None:
        del self.shard_of(name)[name]

    def names(self) -> list[str]:
        return [name for tensors in self.shards.values() for name in tensors]

    def right_index(self) -> dict[str, Any]:
        total = sum(len(tensor.data) for tensors in self.shards.values() for tensor in tensors.values())
        weight_map = {name: shard for shard, tensors in self.shards.items() for name in tensors}
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    def write(self, folder: Path) -> Path:
        """Write all files into ``folder``, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        for shard, tensors in self.shards.items():
            (folder / shard).write_bytes(safetensors_bytes(tensors, self.metadata.get(shard), pad=self.pad))
        index = self.right_index() if self.index == "auto" else self.index
        if index is not None:
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        if self.config is not None:
            (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder


@dataclass(frozen=True)
class Module:
    """A quantized module of an Espalier checkpoint. ``bias`` is a dtype or None."""

    name: str
    in_features: int
    out_features: int
    codebook: str = "e2m1@2"
    rotation: tuple[int, int] = (128, 128)
    size_source: str = "exact"
    bias: str | None = None


@dataclass(frozen=True)
class Bank:
    """An expert bank: projections with their sizes, all with the same codebooks and assignment."""

    name: str
    projections: Mapping[str, tuple[int, int]]
    codebooks: Sequence[str] = ("e2m1@1", "e2m1@2", "int5@3")
    assignment: str = "0121"
    rotation: tuple[int, int] = (64, 64)


@dataclass(frozen=True)
class Exl3Module:
    """A module of an EXL3 checkpoint with its true sizes; they are padded to multiples of 128.

    ``marker`` is "mcg", "mul1" or None for 3INST. ``bias`` is a dtype or None, of the padded size with +0
    in the padding, or of the true size with ``unpadded_bias``. ``packed_su`` and ``packed_sv`` make the
    legacy signs.
    """

    name: str
    in_features: int
    out_features: int
    bits: float = 2
    marker: str | None = "mcg"
    bias: str | None = None
    unpadded_bias: bool = False
    packed_su: bool = False
    packed_sv: bool = False


DEFAULT_MODULES = (
    Module("model.layers.0.self_attn.q_proj", 96, 64, "int6@4", (32, 64), bias="BF16"),
    Module("model.layers.0.self_attn.o_proj", 64, 90, "exl3-mul1@2.5", (64, 128)),
    Module("model.layers.0.mlp.shared_expert.up_proj", 96, 40, "e2m1@1.5", (0, 0)),
    Module("lm_head", 96, 150, "int8@6", (32, 256), bias="F16"),
)
DEFAULT_BANKS = (
    Bank(
        "model.layers.0.mlp.experts",
        {"gate_proj": (96, 64), "down_proj": (64, 96)},
        assignment="01-2",
        rotation=(32, 32),
    ),
)


def espalier_draft(
    modules: Sequence[Module] = DEFAULT_MODULES,
    banks: Sequence[Bank] = DEFAULT_BANKS,
    plain: Mapping[str, Tensor] | None = None,
    *,
    num_shards: int = 1,
    source: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Draft:
    """Make a valid Espalier checkpoint; ``config`` is what config.json holds beside ``quantization_config``."""
    tensors: dict[str, Tensor] = dict(default_plain(seed) if plain is None else plain)
    ignore = [name[: -len(".weight")] for name in tensors if name.endswith("_proj.weight")]
    used: list[str] = []
    for module in modules:
        tensors.update(_espalier_tensors(module, seed))
        used.append(module.codebook)
    for bank in banks:
        for expert, character in enumerate(bank.assignment):
            for projection, (inputs, outputs) in bank.projections.items():
                name = f"{bank.name}.{expert}.{projection}"
                if character == "-":
                    tensors[f"{name}.weight"] = bf16(_Random(name, seed).normal((outputs, inputs)))
                    ignore.append(name)
                else:
                    codebook = bank.codebooks[int(character, 36)]
                    tensors.update(_espalier_tensors(Module(name, inputs, outputs, codebook, bank.rotation), seed))
                    used.append(codebook)
    bits, head_bits = average_bits(modules, banks)
    block: dict[str, Any] = {
        "quant_method": "espalier",
        "format_version": 1,
        "required_features": [],
        "producer": {"name": "builders", "version": "1"},
        "bits": bits,
        "head_bits": head_bits,
        "codebooks": {name: codebook_constants(name) for name in sorted(set(used))},
        "modules": {
            module.name: {
                "codebook": module.codebook,
                "in_features": module.in_features,
                "out_features": module.out_features,
                "rotation": {"in": module.rotation[0], "out": module.rotation[1]},
                "size_source": module.size_source,
            }
            for module in modules
        },
        "expert_banks": {
            bank.name: {
                "num_experts": len(bank.assignment),
                "projections": {
                    projection: {
                        "in_features": inputs,
                        "out_features": outputs,
                        "rotation": {"in": bank.rotation[0], "out": bank.rotation[1]},
                        "size_source": "exact",
                        "codebooks": list(bank.codebooks),
                        "assignment": bank.assignment,
                    }
                    for projection, (inputs, outputs) in bank.projections.items()
                },
            }
            for bank in banks
        },
        "ignore": sorted(ignore),
    }
    if source is not None:
        block["source"] = dict(source)
    shards = split_shards(tensors, num_shards)
    stated = {"format": "pt", "espalier_format_version": "1"}
    return Draft(
        config={"architectures": ["LlamaForCausalLM"], **(config or {}), "quantization_config": block},
        shards=shards,
        metadata={
            shard: dict(stated)
            for shard, held in shards.items()
            if any(name.rpartition(".")[2].startswith("esp_") for name in held)
        },
    )


def exl3_draft(
    modules: Sequence[Exl3Module],
    plain: Mapping[str, Tensor] | None = None,
    *,
    num_shards: int = 1,
    config: Mapping[str, Any] | None = None,
    storage: bool = True,
    seed: int = 0,
) -> Draft:
    """Make a valid EXL3 checkpoint as exllamav3 writes it; ``storage`` adds quantization_config.json."""
    if plain is None:
        stated = config or {}
        plain = default_plain(seed, hidden=stated.get("hidden_size", 96), vocab=stated.get("vocab_size", 90))
    tensors: dict[str, Tensor] = dict(plain)
    for module in modules:
        tensors.update(exl3_tensors(module, seed))
    block = {
        "quant_method": "exl3",
        "version": "1.6.5",
        "bits": float(modules[0].bits) if modules else 2.0,
        "head_bits": 6,
        "calibration": {"rows": 8, "cols": 512},
        "out_scales": "auto",
        "codebook": (modules[0].marker or "3inst") if modules else "mcg",
    }
    shards = split_shards(tensors, num_shards)
    draft = Draft(
        config={**(config or {}), "quantization_config": block},
        shards=shards,
        index="auto" if num_shards > 1 else None,
        pad=False,
    )
    if storage:
        stored = {module.name: _storage_entry(module, tensors) for module in modules}
        document = json.dumps({**block, "tensor_storage": stored}, indent=4)
        draft.files["quantization_config.json"] = document.encode()
    return draft


def llama_modules(
    *,
    hidden: int = 192,
    intermediate: int = 320,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 64,
    layers: int = 1,
) -> list[tuple[str, int, int]]:
    """Return (name, in_features, out_features) of the decoder linears of a Llama; see ``llama_config``."""
    shapes = {
        "self_attn.q_proj": (hidden, heads * head_dim),
        "self_attn.k_proj": (hidden, kv_heads * head_dim),
        "self_attn.v_proj": (hidden, kv_heads * head_dim),
        "self_attn.o_proj": (heads * head_dim, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }
    return [(f"model.layers.{layer}.{name}", *sizes) for layer in range(layers) for name, sizes in shapes.items()]


def llama_config(
    *,
    hidden: int = 192,
    intermediate: int = 320,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 64,
    layers: int = 1,
    vocab: int = 90,
    **more: Any,
) -> dict[str, Any]:
    """Return a config.json for ``llama_modules``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        **more,
    }


def default_plain(seed: int = 0, *, hidden: int = 96, vocab: int = 90) -> dict[str, Tensor]:
    """A few plain tensors of several dtypes."""
    rng = _Random("plain", seed)
    return {
        "model.embed_tokens.weight": bf16(rng.normal((vocab, hidden))),
        "model.layers.0.input_layernorm.weight": Tensor.of(rng.normal((hidden,)), "F32"),
        "model.layers.0.mlp.gate.weight": Tensor.of(rng.normal((4, hidden)), "F16"),
        "model.norm.weight": bf16(rng.normal((hidden,))),
    }


def split_shards(tensors: Mapping[str, Tensor], number: int) -> dict[str, dict[str, Tensor]]:
    """Cut the tensors into shards of nearly equal numbers of modules, a module never split."""
    if number == 1:
        return {"model.safetensors": dict(tensors)}
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(name.rpartition(".")[0], {})[name] = tensor
    shards: dict[str, dict[str, Tensor]] = {f"model-{n + 1:05}-of-{number:05}.safetensors": {} for n in range(number)}
    names = list(shards)
    for position, group in enumerate(groups.values()):
        shards[names[position * number // len(groups)]].update(group)
    return shards


def exl3_tensors(module: Exl3Module, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a module in the order exllamav3 writes them."""
    rng = _Random(module.name, seed)
    rows, columns = (-(-size // 128) * 128 for size in (module.in_features, module.out_features))
    words = rng.words((rows // 16, columns // 16, int(16 * module.bits)))
    suh, svh = _scales(rng, rows, module.in_features), _scales(rng, columns, module.out_features)
    found: dict[str, Tensor] = {}
    for kind, packed, values in (("su", module.packed_su, suh), ("sv", module.packed_sv, svh)):
        if packed:
            signs = [sum(int(values[16 * w + b] < 0) << b for b in range(16)) for w in range(len(values) // 16)]
            found[f"{module.name}.{kind}"] = Tensor("I16", (len(signs),), struct.pack(f"<{len(signs)}H", *signs))
        else:
            found[f"{module.name}.{kind}h"] = Tensor.of(values, "F16")
    if module.bias is not None:
        bias = np.zeros(columns, np.float32)
        bias[: module.out_features] = rng.normal((module.out_features,))
        bias = bias[: module.out_features] if module.unpadded_bias else bias
        found[f"{module.name}.bias"] = bf16(bias) if module.bias == "BF16" else Tensor.of(bias, module.bias)
    if module.marker is not None:
        value = MARKERS[module.marker]
        found[f"{module.name}.{module.marker}"] = Tensor("I32", (), struct.pack("<I", value))
    found[f"{module.name}.trellis"] = Tensor.of(words, "I16")
    return found


def codebook_constants(name: str) -> dict[str, str]:
    """The entry of a codebook in ``quantization_config.codebooks``."""
    family, _, width = name.partition("@")
    if family in _GRIDS:
        grid = _GRIDS[family]
        table = np.array(grid["table"], dtype=np.int8)
        return {
            "multiplier": grid["widths"][width]["multiplier"],
            "sha256": hashlib.sha256(table.tobytes()).hexdigest(),
        }
    multiplier, addend = {
        "exl3-3inst": (89226354, 64248484),
        "exl3-mcg": (MARKERS["mcg"], 0),
        "exl3-mul1": (MARKERS["mul1"], 0),
    }[family]
    constants = {"multiplier": f"0x{multiplier:08X}", "sha256": _exl3_sha256(family, multiplier, addend)}
    return {**constants, "addend": f"0x{addend:08X}"} if addend else constants


def average_bits(modules: Sequence[Module], banks: Sequence[Bank]) -> tuple[float, float | None]:
    """``bits`` and ``head_bits`` of a config; knows only lm_head, mtp and visual as what ``bits`` leaves out."""
    sums: dict[str, list[Decimal]] = {"decoder": [Decimal(0), Decimal(0)], "head": [Decimal(0), Decimal(0)]}
    everything = list(modules)
    for bank in banks:
        for character in bank.assignment.replace("-", ""):
            everything += [
                Module(f"{bank.name}.0.{projection}", *sizes, bank.codebooks[int(character, 36)], bank.rotation)
                for projection, sizes in bank.projections.items()
            ]
    for module in everything:
        parts = module.name.split(".")
        if "mtp" in parts or "visual" in parts:
            continue
        total = sums["head" if "lm_head" in parts else "decoder"]
        rows, columns = padded_sizes(module)
        total[0] += Decimal(module.codebook.partition("@")[2]) * rows * columns
        total[1] += module.in_features * module.out_features

    def rounded(total: list[Decimal]) -> float | None:
        return float((total[0] / total[1]).quantize(Decimal("0.000001"), ROUND_HALF_EVEN)) if total[1] else None

    return rounded(sums["decoder"]) or 0.0, rounded(sums["head"])


def bits_of_modules(modules: Iterable[Any]) -> tuple[float, float | None]:
    """The same of modules with a codebook, a rotation and sizes, such as those of an open checkpoint."""
    return average_bits(
        [Module(each.name, each.in_features, each.out_features, each.codebook.name, each.rotation) for each in modules],
        (),
    )


def padded_sizes(module: Module) -> tuple[int, int]:
    """Stored (in, out) of a module."""
    rows, columns = (
        -(-size // (block or 16)) * (block or 16)
        for size, block in zip((module.in_features, module.out_features), module.rotation, strict=True)
    )
    return rows, columns


def _espalier_tensors(module: Module, seed: int) -> dict[str, Tensor]:
    rng = _Random(module.name, seed)
    rows, columns = padded_sizes(module)
    width = int(16 * float(module.codebook.partition("@")[2]))
    words = rng.words((rows // 16, columns // 16, width))
    found = {
        f"{module.name}.esp_suh": Tensor.of(_scales(rng, rows, module.in_features), "F16"),
        f"{module.name}.esp_svh": Tensor.of(_scales(rng, columns, module.out_features), "F16"),
    }
    if module.bias is not None:
        bias = rng.normal((module.out_features,))
        found[f"{module.name}.bias"] = bf16(bias) if module.bias == "BF16" else Tensor.of(bias, module.bias)
    found[f"{module.name}.esp_trellis"] = Tensor.of(words, "I16")
    return found


def _storage_entry(module: Exl3Module, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "I16": "int16"}
    own = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] == module.name}
    entry: dict[str, Any] = {
        "stored_tensors": {
            name: {"shape": list(t.shape), "n_bytes": len(t.data), "dtype": f"torch.{names[t.dtype]}"}
            for name, t in own.items()
        },
        "quant_format": "exl3",
        "bits_per_weight": module.bits,
    }
    if module.marker is not None:
        entry[f"{module.marker}_multiplier"] = MARKERS[module.marker]
    return entry


def _scales(rng: _Random, size: int, true: int) -> np.ndarray:
    """Signs times magnitudes near one, and zeros in the padding."""
    values = np.sign(rng.uniform(-1, 1, (size,))) * rng.uniform(0.5, 1.5, (size,))
    values[true:] = 0
    return values.astype(np.float16)


class _Random:
    """Numbers that no release of numpy changes: only the raw stream of PCG64 is guaranteed to stay."""

    def __init__(self, name: str, seed: int) -> None:
        self._bits = np.random.PCG64([seed, zlib.crc32(name.encode())])

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        """Any 16-bit words."""
        return (self._raw(shape) >> np.uint64(48)).astype(np.uint16).view(np.int16)

    def uniform(self, low: float, high: float, shape: tuple[int, ...]) -> np.ndarray:
        return low + (high - low) * (self._raw(shape) >> np.uint64(11)) * 2.0**-53

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        """Nearly normal: the sum of twelve uniform numbers."""
        return self.uniform(-0.5, 0.5, (12, *shape)).sum(axis=0)

    def _raw(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._bits.random_raw(int(np.prod(shape))).reshape(shape)


@cache
def _exl3_sha256(family: str, multiplier: int, addend: int) -> str:
    """SHA-256 over the 65,536 values as little-endian float16."""
    hashed = (np.arange(65536, dtype=np.uint64) * multiplier + addend) % 2**32
    if family == "exl3-mul1":
        total = sum((hashed >> shift) % 256 for shift in (0, 8, 16, 24)).astype(np.float64)
        values = ((1024 + total) * 0.00676727294921875 - 10.3828125).astype(np.float16)
    else:
        mixed = (hashed & 0x8FFF8FFF) ^ 0x3B603B60
        halves = [(part % 65536).astype(np.uint16).view(np.float16) for part in (mixed, mixed >> 16)]
        values = (halves[0].astype(np.float64) + halves[1].astype(np.float64)).astype(np.float16)
    return hashlib.sha256(values.astype("<f2").tobytes()).hexdigest()
