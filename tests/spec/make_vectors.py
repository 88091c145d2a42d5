"""Writes spec/vectors/*.json from tests/spec/independent.py. Run it as a script; a test compares the result.

    python tests/spec/make_vectors.py          # writes spec/vectors

Each file is {"about": one line, then data}. Halfwords, states and fp16 codes are lower-case hex, four
digits each, separated by one space.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import independent as ind

SPEC = Path(__file__).parents[2] / "spec"
GRIDS: dict[str, Any] = json.loads((SPEC / "grids.json").read_text("ascii"))
CHECK_TILES = Path(__file__).parents[1] / "fixtures" / "check_tiles.json"


def hex4(values: list[int]) -> str:
    return " ".join(f"{v & 0xFFFF:04x}" for v in values)


@lru_cache
def codebook(name: str) -> ind.Codes:
    return ind.Codes(name, GRIDS)


def tile_halfwords(half_steps: int) -> list[int]:
    """The tile of the packing vectors: h[j] = (40503 j + 12345) mod 65536."""
    return [(40503 * j + 12345) & 0xFFFF for j in range(ind.halfwords_per_tile(half_steps))]


def noise(label: str, count: int) -> list[int]:
    """Reproducible 16-bit numbers: SHA-256 of "label:block", two bytes at a time, little-endian."""
    data = b"".join(hashlib.sha256(f"{label}:{block}".encode()).digest() for block in range(-(-count // 16)))
    return list(struct.unpack(f"<{count}H", data[: 2 * count]))


def packing() -> dict[str, Any]:
    widths = {}
    for width, half_steps in ind.WIDTHS.items():
        halfwords = tile_halfwords(half_steps)
        states = ind.unpack(halfwords, half_steps)
        widths[width] = {
            "halfwords": hex4(halfwords),
            "states": hex4(states),
            "states_crc32": f"{zlib.crc32(struct.pack('<256H', *states)):08x}",
        }
    about = "One stored tile per width and its 256 states in ring order (spec/packing.md)."
    return {"about": about, "widths": widths}


def codebooks() -> dict[str, Any]:
    spots = [0x00FF, 0x1234, 0x7FFF, 0x8000, 0xA5A5]
    entries: dict[str, Any] = {}
    for name in ind.codebook_names(GRIDS):
        book = codebook(name)
        entry: dict[str, Any] = {
            "width": name.split("@")[1],
            "half_steps": book.half_steps,
            "halfwords_per_tile": ind.halfwords_per_tile(book.half_steps),
            "multiplier": f"0x{book.multiplier:08X}",
            "sha256": book.sha256,
            "codes_crc32": f"{zlib.crc32(book.bytes):08x}",
        }
        if book.grid:
            entry["value_scale"] = float(book.scale)
            entry["first16"], entry["last16"] = book.codes[:16], book.codes[-16:]
        else:
            if name.startswith("exl3-3inst"):
                entry["addend"] = f"0x{ind.EXL3['exl3-3inst'][1]:08X}"
            entry["first16"], entry["last16"] = hex4(book.codes[:16]), hex4(book.codes[-16:])
        entry["spots"] = {f"{s:04x}": book.text(book.codes[s]) for s in spots}
        entries[name] = entry
    about = "Constants, hashes and some codes of every codebook; spots maps a state to its code (spec/codebook-*.md)."
    return {"about": about, "codebooks": entries}


def tiles() -> dict[str, Any]:
    given = json.loads(CHECK_TILES.read_text("ascii"))
    entries = {}
    for name in ind.codebook_names(GRIDS):
        book = codebook(name)
        halfwords = [h & 0xFFFF for h in given[name]["trellis"]] if name in given else tile_halfwords(book.half_steps)
        codes = [code for row in ind.decode_tiles([[halfwords]], book) for code in row]
        entries[name] = {"halfwords": hex4(halfwords), "codes": codes if book.grid else hex4(codes)}
    return {"about": "One tile per codebook: stored halfwords and the 256 codes, row-major.", "tiles": entries}


MODULES = (  # codebook, (in block, out block), (in_features, out_features)
    ("e2m1@1", (0, 0), (10, 13)),
    ("int8@5", (0, 0), (16, 16)),
    ("e2m1@1.5", (32, 0), (40, 16)),
    ("e2m1@2", (0, 64), (16, 100)),
    ("int5@2.5", (32, 32), (33, 30)),
    ("int5@3", (32, 64), (32, 64)),
    ("int6@3.5", (64, 32), (50, 32)),
    ("int6@4", (64, 64), (60, 61)),
    ("int8@6", (0, 128), (16, 128)),
    ("exl3-mcg@1", (128, 128), (100, 72)),
    ("exl3-mul1@1.5", (256, 32), (200, 32)),
    ("exl3-3inst@1", (64, 256), (64, 130)),
)
SPECIAL_SCALES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x3C01, 0xBBFF, 0x5BFF, 0x3555)
"""+0, -0, the smallest subnormal, the largest negative subnormal, 1+ulp, -(1-ulp), 255.9 (0.9995 in svh), 1/3."""


def scales(label: str, padded: int, true: int) -> list[int]:
    """fp16 patterns: special ones near the start, magnitudes in [2^-7, 2^-3) of either sign; +0 in the padding."""
    values = [n & 0x8FFF | 0x2000 for n in noise(label, true)]
    start = 3 if true > 12 else 0
    values[start : start + len(SPECIAL_SCALES)] = SPECIAL_SCALES
    if label.endswith("svh"):
        values = [0x3BFF if v == 0x5BFF else v for v in values]  # two large scales on one weight would overflow float16
    return values[:true] + [0] * (padded - true)


def spots(rows: int, columns: int) -> list[tuple[int, int]]:
    """All entries of a small weight; else corners, the rows and columns with special scales, a diagonal."""
    if rows * columns <= 256:
        return [(n, k) for n in range(rows) for k in range(columns)]
    places = [(n, k) for n in range(3, 11) for k in range(3, 11)]
    places += [(0, 0), (0, columns - 1), (rows - 1, 0), (rows - 1, columns - 1)]
    places += [(n % rows, (7 * n + 1) % columns) for n in range(0, 3 * rows, max(1, rows // 12))]
    return sorted(set(places))


def rotation() -> dict[str, Any]:
    entries = []
    for name, blocks, (in_features, out_features) in MODULES:
        book = codebook(name)
        label = f"{name}/{blocks[0]}/{blocks[1]}"
        in_p, out_p = ind.padded(in_features, blocks[0]), ind.padded(out_features, blocks[1])
        width = ind.halfwords_per_tile(book.half_steps)
        flat = noise(f"{label}/trellis", in_p // 16 * (out_p // 16) * width)
        chunks = [flat[i : i + width] for i in range(0, len(flat), width)]
        trellis = [chunks[i : i + out_p // 16] for i in range(0, len(chunks), out_p // 16)]
        suh, svh = scales(f"{label}/suh", in_p, in_features), scales(f"{label}/svh", out_p, out_features)
        codes = ind.decode_tiles(trellis, book)
        exact = ind.exact_weight(codes, book, (suh, svh), blocks, (in_features, out_features))
        entry: dict[str, Any] = {
            "codebook": name,
            "rotation": {"in": blocks[0], "out": blocks[1]},
            "in_features": in_features,
            "out_features": out_features,
            "trellis_shape": [in_p // 16, out_p // 16, width],
            "trellis_label": f"{label}/trellis",
            "trellis_sha256": hashlib.sha256(struct.pack(f"<{len(flat)}H", *flat)).hexdigest(),
            "suh": hex4(suh),
            "svh": hex4(svh),
            "decode_digest": ind.decode_digest(codes, grid=book.grid),
        }
        if len(flat) <= 512:
            entry["trellis"] = hex4(flat)
        for dtype in ("float32", "float16", "bfloat16"):
            bits = [ind.round_root(negative, square, dtype) for line in exact for negative, square in line]
            form = "I" if dtype == "float32" else "H"
            entry[f"sha256_{dtype}"] = hashlib.sha256(struct.pack(f"<{len(bits)}{form}", *bits)).hexdigest()
        entry["weights"] = [
            " ".join(
                [
                    f"{n} {k}",
                    struct.unpack("<d", struct.pack("<Q", ind.round_root(*exact[n][k], "float64")))[0].hex(),
                    f"{ind.round_root(*exact[n][k], 'float32'):08x}",
                    f"{ind.round_root(*exact[n][k], 'float16'):04x}",
                    f"{ind.round_root(*exact[n][k], 'bfloat16'):04x}",
                ]
            )
            for n, k in spots(out_features, in_features)
        ]
        entries.append(entry)
    about = (
        "Whole modules. trellis: halfwords, row-major; where absent, noise(trellis_label) of spec/conformance.md. "
        "sha256_<dtype>: all weights, (out, in) row-major, little-endian. "
        "weights: 'out in float64 float32 float16 bfloat16', correctly rounded."
    )
    return {"about": about, "modules": entries}


ROUNDING = (  # (name, value): ties, carries, subnormals, the largest finite values
    ("one", Fraction(1)),
    ("tie to even, down", 1 + Fraction(1, 2**8)),
    ("tie to even, up", 1 + Fraction(3, 2**8)),
    ("just above a tie", 1 + Fraction(1, 2**8) + Fraction(1, 2**40)),
    ("just above a tie by less than a double can say", 1 + Fraction(1, 2**8) + Fraction(1, 2**80)),
    ("carry into the exponent", 2 - Fraction(1, 2**30)),
    ("tie of float16", 1 + Fraction(1, 2**11)),
    ("tie of float16, just below", 1 + Fraction(1, 2**11) - Fraction(1, 2**80)),
    ("subnormal of float16", Fraction(5, 2**25)),
    ("half the least float16", Fraction(1, 2**25)),
    ("least float16 by rounding up", Fraction(3, 2**26)),
    ("largest float16", Fraction(65504)),
    ("largest that rounds to a finite float16", Fraction(65520) - Fraction(1, 2**60)),
    ("first that overflows float16", Fraction(65520)),
    ("third", Fraction(1, 3)),
    ("tie of float32, down", 1 + Fraction(1, 2**24)),
    ("tie of float32, up", 1 + Fraction(3, 2**24)),
    ("just above a tie of float32", 1 + Fraction(1, 2**24) + Fraction(1, 2**80)),
    ("largest subnormal of float32", Fraction(2**23 - 1, 2**149)),
    ("carry to the least normal float32", Fraction(2**24 - 1, 2**150)),
    ("subnormal of float32, tie", Fraction(5, 2**150)),
    ("half the least float32", Fraction(1, 2**150)),
    ("least float32 by rounding up", Fraction(3, 2**151)),
    ("subnormal of bfloat16, tie", Fraction(5, 2**134)),
    ("half the least bfloat16", Fraction(1, 2**134)),
    ("largest bfloat16", (2 - Fraction(1, 2**7)) * 2**127),
    ("first that overflows bfloat16", (2 - Fraction(1, 2**8)) * 2**127),
    ("largest float32", (2 - Fraction(1, 2**23)) * 2**127),
    ("largest that rounds to a finite float32", (2 - Fraction(1, 2**24)) * 2**127 - Fraction(1, 2**60)),
    ("first that overflows float32", (2 - Fraction(1, 2**24)) * 2**127),
)


def rounding() -> dict[str, Any]:
    entries = []
    for label, value in ROUNDING:
        for sign in (1, -1):
            fraction = sign * value
            entry = {"name": label, "numerator": str(fraction.numerator), "denominator": str(fraction.denominator)}
            for dtype in ("float32", "float16", "bfloat16"):
                digits = ind.FORMATS[dtype][2] // 4
                entry[dtype] = f"{ind.round_fraction(fraction, dtype):0{digits}x}"
            entries.append(entry)
    about = "Rational numbers and their nearest bit patterns; infinities stand for overflow (spec/rotation.md)."
    return {"about": about, "values": entries}


def digest() -> dict[str, Any]:
    entries = []
    for name in ("e2m1@1", "int6@4", "exl3-mul1@2.5"):
        book = codebook(name)
        halfwords = tile_halfwords(book.half_steps)
        codes = ind.decode_tiles([[halfwords]], book)
        flat = [code for row in codes for code in row]
        entries.append(
            {
                "codebook": name,
                "halfwords": hex4(halfwords),
                "first8_bytes": struct.pack("<4H", *[c & 0xFFFF for c in flat[:4]]).hex(" "),
                "decode_digest": ind.decode_digest(codes, grid=book.grid),
            }
        )
    text = b"espalier\n"
    blob = hashlib.sha1(b"blob %d\0" % len(text) + text, usedforsecurity=False).hexdigest()
    file = {"utf8": text.decode(), "size": len(text), "sha256": hashlib.sha256(text).hexdigest(), "git_blob_sha1": blob}
    about = "Decode digests of modules of one tile, and the hashes of a small file (spec/manifest.md)."
    return {"about": about, "tiles": entries, "file": file}


def signs() -> dict[str, Any]:
    words = [0x0001, 0x8000, 0xA5C3, 0x0000, 0xFFFF]
    about = "Legacy packed signs and the fp16 scales they stand for (spec/exl3.md)."
    return {"about": about, "words": hex4(words), "scales": hex4(ind.expand_signs(words))}


def component_rules() -> list[tuple[str, str]]:
    """The lines (component, P) of spec/config.md §8."""
    lines = (SPEC / "config.md").read_text("utf-8").partition("```text\n")[2].partition("```")[0].splitlines()
    return [(line[:18].strip(), line[18:]) for line in lines]


COMPONENT_NAMES = (
    "model.layers.0.self_attn.q_proj", "model.layers.0.attn.c_attn", "model.layers.0.attention.wq",
    "model.layers.0.cross_attn.k_proj", "model.layers.0.self_attn.q_norm", "model.layers.0.self_attn_x.q_proj",
    "model.layers.0.linear_attn.in_proj_qkv", "backbone.layers.0.mamba.in_proj", "model.layers.0.mixer.in_proj",
    "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.gate", "model.layers.0.gate",
    "model.layers.0.mlp.gate.proj", "model.layers.0.block_sparse_moe.gate", "model.layers.0.feed_forward.w1",
    "model.layers.0.mlp.experts.17.down_proj", "model.layers.0.block_sparse_moe.experts.0.w1", "experts.0.w1",
    "model.layers.0.mlp.shared_expert.up_proj", "model.layers.0.mlp.shared_experts.up_proj",
    "model.layers.0.mlp.shared_expert_gate", "model.layers.0.mlp.experts.shared_mlp.up_proj", "model.layers.0.router",
    "model.layers.0.input_layernorm", "model.norm", "model.norm2", "model.norm2b", "model.layers.0.Norm",
    "lm_head", "model.language_model.lm_head", "lm_head.0", "lm_head_norm", "lm_heads", "head", "head.proj", "heads",
    "model.head", "score", "model.embed_tokens", "model.embeddings.word_embeddings", "transformer.wte",
    "ngram_embedding.shard_0", "model.embed_tokens_per_layer", "model.embedder",
    "model.visual.blocks.0.attn.q_proj", "vision_tower.encoder.layers.0.mlp.fc1", "model.vision.head", "Vision.x",
    "vision_Tower.x", "audio_tower.layers.0.self_attn.k_proj", "multi_modal_projector.linear_1", "model.embed_vision.x",
    "mtp.layers.0.mlp.experts.3.up_proj", "mtp.fc", "model.mtp_block.self_attn.o_proj", "model.layers.61.eh_proj",
    "model.layers.61.shared_head.head", "mtp.lm_head", "visual.mtp", "model.ατ.self_attn", "x",
)  # fmt: skip


def components() -> dict[str, Any]:
    rules = component_rules()
    about = "Names of modules, each with the component that it belongs to (spec/config.md)."
    return {"about": about, "components": [[name, ind.component(name, rules)] for name in COMPONENT_NAMES]}


def sized(name: str, sizes: tuple[int, int], blocks: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    rotation = {"in": blocks[0], "out": blocks[1]}
    return {"codebook": name, "in_features": sizes[0], "out_features": sizes[1], "rotation": rotation}


def bits() -> dict[str, Any]:
    def case(name: str, modules: dict[str, Any], banks: dict[str, Any] | None = None) -> dict[str, Any]:
        average, head = ind.averages(modules, banks or {}, component_rules())
        entry = {"name": name, "bits": average, "head_bits": head, "modules": modules, "expert_banks": banks or {}}
        for module in modules.values():
            module["size_source"] = "exact"
        return entry

    def bank(sizes: tuple[int, int], codebooks: list[str], assignment: str) -> dict[str, Any]:
        entry = {**sized("", sizes, (64, 32)), "size_source": "exact", "codebooks": codebooks, "assignment": assignment}
        del entry["codebook"]
        return entry

    q, up = "layers.0.self_attn.q_proj", "layers.0.mlp.up_proj"
    large = (16 * 999, 16 * 1001)
    experts = {
        "num_experts": 5,
        "projections": {
            "gate_proj": bank((100, 70), ["e2m1@1", "e2m1@1.5", "int5@3"], "01-21"),
            "down_proj": bank((70, 100), ["exl3-mul1@2.5"], "0-000"),
        },
    }
    entries = [
        case("nothing", {}),
        case("padding counts as bits, not as weights", {q: sized("e2m1@2", (100, 257), (0, 256))}),
        case("two modules, weighed by size", {q: sized("int6@3.5", (96, 64)), up: sized("e2m1@1.5", (64, 16))}),
        case("tie at the seventh decimal, down", {q: sized("e2m1@1", large), up: sized("e2m1@1.5", (16, 16))}),
        case("tie at the seventh decimal, up", {q: sized("e2m1@1", large), up: sized("int5@2.5", (16, 16))}),
        case("a head alone", {"lm_head": sized("exl3-mcg@6", (128, 200), (128, 128))}),
        case(
            "head, mtp and vision do not count for bits",
            {
                q: sized("int5@3", (64, 64), (64, 64)),
                "lm_head": sized("int8@5", (64, 100), (64, 0)),
                "mtp.fc": sized("int8@6", (64, 64)),
                "visual.blocks.0.mlp.fc1": sized("int8@6", (64, 64)),
            },
        ),
        case("a bank with plain experts", {q: sized("int6@4", (60, 60), (32, 32))}, {"layers.0.mlp.experts": experts}),
        case("a bank of mtp", {q: sized("int6@4", (16, 16))}, {"mtp.layers.0.mlp.experts": experts}),
    ]
    about = "Modules and banks as in a config, and the averages that it must state (spec/config.md)."
    return {"about": about, "configs": entries}


FILES = {
    "packing.json": packing,
    "codebooks.json": codebooks,
    "tiles.json": tiles,
    "rotation.json": rotation,
    "rounding.json": rounding,
    "digest.json": digest,
    "signs.json": signs,
    "components.json": components,
    "bits.json": bits,
}


def dumps(document: dict[str, Any]) -> bytes:
    """JSON with one line per entry of the data, so that a difference can be read."""
    lines = []
    for key, value in document.items():
        if isinstance(value, dict) and any(isinstance(v, (dict, list)) for v in value.values()):
            body = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f"  {json.dumps(key)}: {{\n{body}\n  }}")
        elif isinstance(value, list):
            body = ",\n".join(f"    {json.dumps(v)}" for v in value)
            lines.append(f"  {json.dumps(key)}: [\n{body}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def main() -> None:
    folder = SPEC / "vectors"
    folder.mkdir(exist_ok=True)
    for name, build in FILES.items():
        (folder / name).write_bytes(dumps(build()))


if __name__ == "__main__":
    main()
