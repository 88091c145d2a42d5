"""Open an Espalier checkpoint: config, shard headers and index must agree exactly (spec/espalier-v1.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from espalier_format.checkpoint.base import Checkpoint, ExpertBankView
from espalier_format.checkpoint.exl3_names import SCALE_KINDS
from espalier_format.checkpoint.files import compare_index, other_files, read_index
from espalier_format.checkpoint.module import Blocks, QuantizedModule
from espalier_format.checkpoint.plain_copies import copy_warnings
from espalier_format.checkpoint.tensors import FLOATING, LazyMapping, TensorTable
from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.rotation import padded
from espalier_format.container.names import CONFIG_NAME
from espalier_format.errors import (
    DtypeError,
    FormatVersionError,
    MissingTensorError,
    ShapeError,
    UnexpectedTensorError,
)
from espalier_format.schema.config import FORMAT_VERSION, parse_quantization_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.container.folder import CheckpointFolder
    from espalier_format.container.shard import Shard
    from espalier_format.schema.config import ModuleSpec, QuantizationConfig
    from espalier_format.schema.expert_bank import Projection

VERSION_KEY: Final = "espalier_format_version"
"""Key in the ``__metadata__`` of shards with ``esp_`` tensors; the value is the format version as a string."""

ESP_PREFIX: Final = "esp_"
"""What the last part of the name of every tensor starts with that the config must account for."""


class _Form(NamedTuple):
    """What a module, or each quantized expert of a projection, must look like."""

    codebook: Codebook
    sizes: ModuleSpec | Projection
    trellis: tuple[int, int, int]
    suh: tuple[int]
    svh: tuple[int]


def open_espalier(folder: CheckpointFolder, config: Mapping[str, Any]) -> Checkpoint:
    """Check an Espalier checkpoint without reading tensor data, and return it.

    Raises:
        RefusedError: the config (``parse_quantization_config``), a shard header or the index is refused.
        FormatVersionError: a shard with ``esp_`` tensors does not state version 1.
        IndexMismatchError: the index and the shard headers differ.
        MissingTensorError, UnexpectedTensorError, DtypeError, ShapeError: config and headers differ.
    """
    quantization = parse_quantization_config(config["quantization_config"], folder.root / CONFIG_NAME)
    shards = folder.open_shards()
    try:
        # In the order of spec/errors.md §4: a file that is wrong twice has one code.
        table = TensorTable(shards)
        stored = [name for shard in shards for name in _quantized_tensors(shard)]
        index = read_index(folder)
        table.refuse_duplicates()
        compare_index(index, folder, shards)
        esp = set(stored)
        plain = tuple(name for name in table.infos if name not in esp)
        forms = _check_modules(quantization, table, {name for name in plain if name.endswith(".bias")})
        # Every module has its three tensors, so the numbers are equal just when there are no others.
        if len(stored) != 3 * len(forms):
            _refuse_unexpected(stored, forms, table)
        _refuse_exl3_modules(plain, table)
        others = other_files(folder, shards)
    except BaseException:
        for shard in shards:
            shard.close()
        raise

    def module(name: str) -> QuantizedModule:
        codebook, sizes, *_ = forms[name]
        bias = f"{name}.bias"
        return QuantizedModule(
            name=name,
            codebook=codebook,
            in_features=sizes.in_features,
            out_features=sizes.out_features,
            rotation=Blocks(sizes.rotation.in_, sizes.rotation.out),
            size_source=sizes.size_source,
            trellis=table.ref(f"{name}.esp_trellis"),
            suh=table.ref(f"{name}.esp_suh"),
            svh=table.ref(f"{name}.esp_svh"),
            bias=table.ref(bias) if bias in table.infos else None,
        )

    return Checkpoint(
        folder=folder,
        format="espalier",
        config=config,
        quantization=quantization,
        shards=shards,
        tensors=table.refs(),
        modules=LazyMapping([name[: -len(".esp_trellis")] for name in stored if name.endswith(".esp_trellis")], module),
        expert_banks={name: _bank_view(name, quantization) for name in quantization.expert_banks},
        plain=table.refs([n for n in plain if not (n.endswith(".bias") and n[: -len(".bias")] in forms)]),
        other_files=others,
        warnings=copy_warnings(plain, forms, table.infos),
    )


def _quantized_tensors(shard: Shard) -> list[str]:
    """Return the ``esp_`` tensors of a shard in header order, and check that the shard states its version."""
    usual = (".esp_trellis", ".esp_suh", ".esp_svh")
    found = [
        name
        for name in shard.header.tensors
        if name.endswith(usual) or (ESP_PREFIX in name and name.rpartition(".")[2].startswith(ESP_PREFIX))
    ]
    if found:
        stated = shard.header.metadata.get(VERSION_KEY)
        if stated != str(FORMAT_VERSION):
            raise FormatVersionError(
                f"the shard holds {ESP_PREFIX} tensors, but its metadata states {VERSION_KEY} "
                f"{'nowhere' if stated is None else repr(stated)}; this reader knows '{FORMAT_VERSION}' only",
                path=shard.path,
            )
    return found


def _check_modules(config: QuantizationConfig, table: TensorTable, biases: set[str]) -> dict[str, _Form]:
    """Return every quantized module that the config names, after checking its tensors."""
    checked: dict[str, _Form] = {}
    for name, module in config.modules.items():
        form = checked[name] = _form(module, module.codebook)
        _check_module(name, form, table, biases)
    for bank_name, bank in config.expert_banks.items():
        for projection_name, projection in bank.projections.items():
            forms = {codebook: _form(projection, codebook) for codebook in projection.codebooks}
            for expert, codebook in enumerate(projection.expert_codebooks()):
                name = f"{bank_name}.{expert}.{projection_name}"
                if codebook is None:
                    _check_plain_expert(name, projection, table)
                else:
                    form = checked[name] = forms[codebook]
                    _check_module(name, form, table, biases)
    return checked


def _form(sizes: ModuleSpec | Projection, codebook_name: str) -> _Form:
    codebook = get_codebook(codebook_name)
    rows, columns = padded(sizes.in_features, sizes.rotation.in_), padded(sizes.out_features, sizes.rotation.out)
    return _Form(codebook, sizes, (rows // 16, columns // 16, codebook.halfwords_per_tile), (rows,), (columns,))


def _check_module(name: str, form: _Form, table: TensorTable, biases: set[str]) -> None:
    find = table.infos.get
    trellis, suh, svh = find(f"{name}.esp_trellis"), find(f"{name}.esp_suh"), find(f"{name}.esp_svh")
    # One expression for the case that is right, 30,000 times; what is wrong is found out afterwards.
    if (
        trellis is None
        or suh is None
        or svh is None
        or trellis.shape != form.trellis
        or suh.shape != form.suh
        or svh.shape != form.svh
        or trellis.dtype != "I16"
        or suh.dtype != "F16"
        or svh.dtype != "F16"
    ):
        for tensor, dtype, shape in (
            (f"{name}.esp_trellis", "I16", form.trellis),
            (f"{name}.esp_suh", "F16", form.suh),
            (f"{name}.esp_svh", "F16", form.svh),
        ):
            _check_tensor(tensor, frozenset({dtype}), shape, table)
    if biases and f"{name}.bias" in biases:
        _check_tensor(f"{name}.bias", FLOATING, (form.sizes.out_features,), table)


def _check_plain_expert(name: str, projection: Projection, table: TensorTable) -> None:
    tensor = f"{name}.weight"
    if tensor not in table.infos:
        raise MissingTensorError("the assignment says that this expert is plain, but no shard holds it", tensor=tensor)
    _check_shape(tensor, (projection.out_features, projection.in_features), table)


def _check_tensor(tensor: str, dtypes: frozenset[str], shape: tuple[int, ...], table: TensorTable) -> None:
    info = table.infos.get(tensor)
    if info is None:
        raise MissingTensorError("quantization_config names the module, but no shard holds this tensor", tensor=tensor)
    if info.dtype not in dtypes:
        expected = " or ".join(sorted(dtypes))
        raise DtypeError(
            "wrong dtype", path=table.shards[tensor].path, tensor=tensor, expected=expected, got=info.dtype
        )
    _check_shape(tensor, shape, table)


def _check_shape(tensor: str, shape: tuple[int, ...], table: TensorTable) -> None:
    stored = table.infos[tensor].shape
    if stored != shape:
        raise ShapeError(
            "wrong shape", path=table.shards[tensor].path, tensor=tensor, expected=list(shape), got=list(stored)
        )


def _refuse_unexpected(stored: list[str], forms: Mapping[str, _Form], table: TensorTable) -> None:
    """Raise ``UnexpectedTensorError`` for the first ``esp_`` tensor that belongs to no module of the config."""
    for tensor in stored:
        module, _, kind = tensor.rpartition(".")
        if module not in forms or kind not in {"esp_trellis", "esp_suh", "esp_svh"}:
            raise UnexpectedTensorError(
                "quantization_config does not account for this tensor", path=table.shards[tensor].path, tensor=tensor
            )


def _refuse_exl3_modules(plain: tuple[str, ...], table: TensorTable) -> None:
    """Raise ``UnexpectedTensorError`` for a module that is still stored in EXL3's form."""
    for tensor in plain:
        if tensor.endswith(".trellis") and len(table.infos[tensor].shape) == 3:
            module = tensor[: -len(".trellis")]
            if any(f"{module}.{kind}" in table.infos for kind in SCALE_KINDS):
                raise UnexpectedTensorError(
                    "an EXL3 module in an Espalier checkpoint", path=table.shards[tensor].path, tensor=tensor
                )


def _bank_view(name: str, quantization: QuantizationConfig) -> ExpertBankView:
    bank = quantization.expert_banks[name]
    return ExpertBankView(
        name,
        bank.num_experts,
        {
            projection_name: tuple(
                None if codebook is None else f"{name}.{expert}.{projection_name}"
                for expert, codebook in enumerate(projection.expert_codebooks())
            )
            for projection_name, projection in bank.projections.items()
        },
    )
