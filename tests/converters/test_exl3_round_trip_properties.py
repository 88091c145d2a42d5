"""EXL3 to Espalier and back for checkpoints that hypothesis draws; compared as `test_exl3_round_trip` does."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from builders import Draft, Exl3Module, Tensor, exl3_draft
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier_format.operations.convert import convert_checkpoint

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.experts.0.up_proj",
    "model.layers.0.mlp.experts.1.up_proj",
    "model.layers.0.mlp.experts.1.down_proj",
    "model.layers.0.mlp.experts.10.up_proj",
    "mtp.fc",
    "lm_head",
]
RATES = st.one_of(
    st.tuples(st.integers(1, 8), st.sampled_from([None, "mcg", "mul1"])),
    st.tuples(st.sampled_from([1.5, 2.5, 3.5]), st.just("mul1")),
)


@st.composite
def modules(draw: st.DrawFn) -> list[Exl3Module]:
    found = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=5)):
        bits, marker = draw(RATES)
        found.append(
            Exl3Module(
                name,
                draw(st.integers(1, 200)),
                draw(st.integers(1, 200)),
                bits,
                marker,
                bias=draw(st.sampled_from([None, "F16", "F32", "BF16"])),
                packed_su=draw(st.booleans()),
                packed_sv=draw(st.booleans()),
            )
        )
    return found


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    chosen = draw(modules())
    names = draw(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), max_size=3))
    plain = {f"plain {name}": Tensor.of(np.zeros(draw(st.integers(0, 5))), "U8") for name in names}
    for module in chosen:  # the true size is known of some
        if draw(st.booleans()):
            plain[f"{module.name}.weight"] = Tensor.of(np.zeros((module.out_features, module.in_features)), "F16")
    keys = st.sampled_from(["tie_word_embeddings", "text_config", "model_type", "vision_config", "x"])
    values = st.sampled_from([True, False, None, 1.5, float("inf"), "ä", {"tie_word_embeddings": True}, []])
    config = draw(st.dictionaries(keys, values))
    draft = exl3_draft(chosen, plain, num_shards=draw(st.integers(1, 3)), config=config)
    if not all(draft.shards.values()):  # an empty shard is not written back, and one of several is no checkpoint
        draft = exl3_draft(chosen, plain, num_shards=1, config=config)
    if draw(st.booleans()):
        draft.index = None
    return draft


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(drafts())
def test_all_files_come_back(draft: Draft) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, espalier, back = (Path(folder) / name for name in ("source", "espalier", "back"))
        draft.write(source)
        convert_checkpoint(source, espalier, to="espalier")
        convert_checkpoint(espalier, back, to="exl3")
        assert files(back) == files(source)


def files(folder: Path) -> dict[str, Any]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "espalier_manifest.json"}
