"""The cases of the kit, each with a name, a kind, and the check that it makes of a callable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final

from espalier_format.codec.dtype_names import parse_dtype
from espalier_format.codec.rounding import OutputDtype
from espalier_format.conformance import comparison
from espalier_format.conformance.at_load import is_declared
from espalier_format.conformance.attempt import attempt, attempt_folder
from espalier_format.conformance.bank_cases import BankCase, bank_cases
from espalier_format.conformance.bench import Bench
from espalier_format.conformance.checkpoint_files import checkpoint_files
from espalier_format.conformance.checkpoints import KitCheckpoint, kit_checkpoints
from espalier_format.conformance.code_cases import CodesCase, code_cases
from espalier_format.conformance.module_case import DTYPES, ModuleCase
from espalier_format.conformance.modules import weight_modules
from espalier_format.conformance.outcome import CaseResult, Kind, Mismatch
from espalier_format.conformance.products import ProductCase, product_cases
from espalier_format.conformance.refusals import Reader, RefusalCase, load_refusals, refusal_cases
from espalier_format.errors import UsageError

Decoder = Callable[..., Any]
"""A callable of a runtime; spec/conformance.md §8 says with what each kind is called."""


@dataclass(frozen=True, slots=True)
class Options:
    """Which cases are wanted, and how strict they are."""

    dtypes: tuple[OutputDtype, ...] = DTYPES
    """Output formats of weights and products; short names ("bf16") become these, and each counts once."""
    exact: bool = False
    """Whether weights have to be correctly rounded, not only within tolerance."""
    readers: tuple[Reader, ...] = ("espalier",)
    """Whose refusals count; "exl3" and "plain" for programs that read those too."""
    only: tuple[str, ...] = ()
    """Patterns of names, as of files (``weights/e2m1@*``); where there are any, only cases that one fits."""
    skip: tuple[str, ...] = ()
    """Patterns of names; no case that one fits."""

    def __post_init__(self) -> None:
        if not self.dtypes:
            raise UsageError("no such output dtype", expected=list(DTYPES), got="none")
        object.__setattr__(self, "dtypes", tuple(dict.fromkeys(parse_dtype(dtype) for dtype in self.dtypes)))

    def wants(self, name: str) -> bool:
        """Tell whether a case of that name is wanted."""
        if self.only and not any(fnmatchcase(name, pattern) for pattern in self.only):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.skip)


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that a callable must do right. It is made without work: `run` builds what it needs."""

    name: str
    kind: Kind
    check: Callable[[Decoder, Bench], Mismatch | None]
    to_refuse: bool = False
    """Of the kind "load": whether it must be refused."""

    def run(self, decoder: Decoder, bench: Bench) -> CaseResult:
        """Call the decoder and judge what it does; one that is right but changes its inputs is wrong, too."""
        bench.carrier.given.clear()
        mismatch = self.check(decoder, bench)
        return CaseResult(self.name, self.kind, mismatch or bench.carrier.changed())


def cases_of(kind: Kind, options: Options) -> Iterator[Case]:
    """Yield the wanted cases of a kind, in their order."""
    for case in _BUILDERS[kind](options):
        if options.wants(case.name):
            yield case


def _open_cases(options: Options, *, kind: Kind = "open") -> Iterator[Case]:
    for checkpoint in kit_checkpoints():
        yield Case(f"{kind}/valid/{checkpoint.name}", kind, partial(_check_valid, checkpoint))
    for refusal in refusal_cases():
        if refusal.reader in options.readers and (kind == "verify" or refusal.operation == "open"):
            yield Case(f"{kind}/refused/{refusal.name}", kind, partial(_check_refused, refusal))


def _codes_cases(_options: Options) -> Iterator[Case]:
    for case in code_cases():
        yield Case(f"codes/{case.label}", "codes", partial(_check_codes, case))


def _weights_cases(options: Options) -> Iterator[Case]:
    for module in weight_modules():
        for dtype in options.dtypes:
            yield Case(
                f"weights/{module.label}/{dtype}", "weights", partial(_check_weights, module, dtype, options.exact)
            )


def _load_cases(options: Options) -> Iterator[Case]:
    for checkpoint in kit_checkpoints():
        for name, module in checkpoint.all_modules().items():
            for dtype in options.dtypes:
                check = partial(_check_load, checkpoint, name, module, dtype, options.exact)
                yield Case(f"load/{checkpoint.name}/{name}/{dtype}", "load", check, dtype in module.refused)
    for refusal, name in load_refusals():
        for dtype in options.dtypes:
            check = partial(_check_load_refused, refusal, name, dtype)
            yield Case(f"load/refused/{refusal.name}/{dtype}", "load", check, to_refuse=True)


def _matmul_cases(options: Options) -> Iterator[Case]:
    for product in product_cases():
        for dtype in options.dtypes:
            if dtype in product.dtypes:
                yield Case(f"matmul/{product.label}/{dtype}", "matmul", partial(_check_matmul, product, dtype))


def _experts_cases(options: Options) -> Iterator[Case]:
    for bank in bank_cases():
        for dtype in options.dtypes:
            yield Case(f"experts/{bank.label}/{dtype}", "experts", partial(_check_experts, bank, dtype))


_BUILDERS: Final[dict[Kind, Callable[[Options], Iterator[Case]]]] = {
    "open": _open_cases,
    "verify": partial(_open_cases, kind="verify"),
    "codes": _codes_cases,
    "weights": _weights_cases,
    "load": _load_cases,
    "matmul": _matmul_cases,
    "experts": _experts_cases,
}


def _valid_folder(checkpoint: KitCheckpoint, bench: Bench) -> Path:
    return bench.folder(f"valid/{checkpoint.name}", checkpoint_files(checkpoint))


def _check_valid(checkpoint: KitCheckpoint, decoder: Decoder, bench: Bench) -> Mismatch | None:
    folder = _valid_folder(checkpoint, bench)
    return attempt_folder(lambda: decoder(str(folder))).failure()


def _check_refused(refusal: RefusalCase, decoder: Decoder, bench: Bench) -> Mismatch | None:
    folder = bench.folder(f"refused/{refusal.name}", refusal.files)
    mismatch = attempt_folder(lambda: decoder(str(folder))).refusal_of(refusal.code)
    if mismatch is None:
        return None
    return Mismatch(f"{mismatch.message} ({refusal.why})", None, mismatch.expected, mismatch.got)


def _check_codes(case: CodesCase, decoder: Decoder, bench: Bench) -> Mismatch | None:
    trellis = case.trellis()
    carrier = bench.carrier
    done = attempt(lambda: carrier.take(decoder(carrier.give(trellis), case.codebook)))
    if case.error is not None:
        return done.refusal_of(case.error)
    return done.failure() or comparison.compare_codes(done.result, case.codes(), trellis)


def _check_weights(
    module: ModuleCase, dtype: OutputDtype, exact: bool, decoder: Decoder, bench: Bench
) -> Mismatch | None:
    tensors, carrier = module.tensors(), bench.carrier
    done = attempt(
        lambda: carrier.take(
            decoder(
                carrier.give(tensors.trellis),
                carrier.give(tensors.suh),
                carrier.give(tensors.svh),
                module.codebook,
                module.rotation_in,
                module.rotation_out,
                module.in_features,
                module.out_features,
                carrier.dtype(dtype),
            )
        )
    )
    if dtype in module.refused:
        refused = done.refusal_of(module.refused[dtype])
        if refused is None or not is_declared(decoder):
            return refused
        return done.failure() or comparison.compare_unchecked(done.result, module, dtype)
    return done.failure() or comparison.compare_weight(done.result, module, dtype, exact=exact)


def _check_load(
    checkpoint: KitCheckpoint,
    name: str,
    module: ModuleCase,
    dtype: OutputDtype,
    exact: bool,
    decoder: Decoder,
    bench: Bench,
) -> Mismatch | None:
    folder = _valid_folder(checkpoint, bench)
    carrier = bench.carrier
    done = attempt(lambda: carrier.take(decoder(str(folder), name, carrier.dtype(dtype))))
    if dtype in module.refused:
        return done.refusal_of(module.refused[dtype])
    return done.failure() or comparison.compare_weight(done.result, module, dtype, exact=exact)


def _check_load_refused(
    refusal: RefusalCase, module: str, dtype: OutputDtype, decoder: Decoder, bench: Bench
) -> Mismatch | None:
    folder = bench.folder(f"refused/{refusal.name}", refusal.files)
    carrier = bench.carrier
    done = attempt(lambda: carrier.take(decoder(str(folder), module, carrier.dtype(dtype))))
    return done.refusal_of(refusal.code)


def _check_matmul(product: ProductCase, dtype: OutputDtype, decoder: Decoder, bench: Bench) -> Mismatch | None:
    module, operands, carrier = product.module, product.operands(), bench.carrier
    tensors = module.tensors()
    done = attempt(
        lambda: carrier.take(
            decoder(
                carrier.give_as(operands.x, dtype),
                carrier.give(tensors.trellis),
                carrier.give(tensors.suh),
                carrier.give(tensors.svh),
                None if operands.bias is None else carrier.give_as(operands.bias, dtype),
                module.codebook,
                module.rotation_in,
                module.rotation_out,
                module.in_features,
                module.out_features,
            )
        )
    )
    return done.failure() or comparison.compare_product(done.result, product, dtype)


def _check_experts(case: BankCase, dtype: OutputDtype, decoder: Decoder, bench: Bench) -> Mismatch | None:
    operands, carrier = case.operands(), bench.carrier
    folder = _valid_folder(case.checkpoint, bench)
    done = attempt(
        lambda: carrier.take(
            decoder(
                carrier.give_as(operands.x, dtype),
                carrier.give(operands.expert_ids),
                carrier.give(operands.expert_weights),
                str(folder),
                case.bank.name,
            )
        )
    )
    return done.failure() or comparison.compare_bank(done.result, case, dtype)
