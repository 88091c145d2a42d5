"""Every way this library refuses, as one closed tree with stable codes (spec/errors.md).

EspalierError
├── RefusedError                    exit code 2: unreadable, unknown or unusable
│   ├── FormatVersionError          format-version
│   ├── FeatureError                required-feature
│   ├── CodebookError               codebook
│   ├── SchemaError                 schema
│   ├── SourceError                 unsupported-source
│   ├── TruncatedError              truncated
│   ├── MalformedError              malformed
│   ├── OverlapError                overlapping-data
│   ├── LimitError                  limit
│   ├── PathError                   path-escape
│   ├── MissingFileError            missing-file          (also FileNotFoundError)
│   ├── OutputExistsError           output-exists         (also FileExistsError)
│   ├── WriteError                  write-failed          (also OSError)
│   ├── LossyError                  lossy
│   ├── UnknownSizeError            unknown-size
│   ├── ScaleOverflowError          scale-overflow
│   ├── DependencyError             missing-dependency    (also ImportError)
│   ├── HubError                    hub
│   ├── UnreachableError            hub-unreachable       (also ConnectionError)
│   └── UsageError                  usage
└── InconsistentError               exit code 1: readable, but wrong
    ├── MissingTensorError          missing-tensor
    ├── UnexpectedTensorError       unexpected-tensor
    ├── DuplicateTensorError        duplicate-tensor
    ├── DtypeError                  dtype
    ├── ShapeError                  shape
    ├── IndexMismatchError          index-mismatch
    ├── NonFiniteScaleError         non-finite-scale
    ├── BitsMismatchError           bits-mismatch
    ├── DigestError                 digest-mismatch
    └── SignatureError              signature
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar


class EspalierError(Exception):
    """Root of all errors raised on purpose by this library.

    ``str(error)`` is one line for a person. ``code`` is stable across releases and is what programs
    compare; ``exit_code`` is what the command line returns for it. The fields ``path``, ``tensor``,
    ``expected`` and ``got`` are None where they do not apply.
    """

    code: ClassVar[str] = ""
    exit_code: ClassVar[int] = 2

    def __init__(
        self,
        message: str,
        *,
        path: str | Path | None = None,
        tensor: str | None = None,
        expected: object = None,
        got: object = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = None if path is None else str(path)
        self.tensor = tensor
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        line = self.message
        if self.tensor is not None and not _is_named(line, self.tensor):
            line = f"{self.tensor}: {line}"
        values = (("expected", self.expected), ("got", self.got))
        shown = ", ".join(f"{label} {value}" for label, value in values if value is not None)
        if shown:
            line += f" ({shown})"
        if self.path is not None and not _names(line, self.path):
            line = f"{self.path}: {line}"
        line = " ".join(line.split())
        # Names come from files that nobody has checked: nothing in them may command a terminal.
        return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _is_named(line: str, tensor: str) -> bool:
    """Tell whether a message names a tensor already: a short name such as "a" is a word, or part of many."""
    if len(tensor) <= 3 and f"'{tensor}'" not in line:
        return False
    return re.search(rf"(?<![\w.-]){re.escape(tensor)}(?![\w-])", line) is not None


def _names(line: str, path: str) -> bool:
    """Tell whether a message names a path already: one of several parts, so that it is no word by chance."""
    return "/" in path and re.search(rf"(?<![\w./-]){re.escape(path)}(?![\w/-])", line) is not None


class RefusedError(EspalierError):
    """The input is not something this library reads, or the request cannot be carried out."""


class FormatVersionError(RefusedError):
    """The checkpoint, or one shard of it, states a format version other than 1, or none."""

    code = "format-version"


class FeatureError(RefusedError):
    """``required_features`` names a feature this library does not know."""

    code = "required-feature"


class CodebookError(RefusedError):
    """A codebook is unknown, or its constants are not the ones the specification freezes."""

    code = "codebook"


class SchemaError(RefusedError):
    """A config, index or manifest is not of the specified form."""

    code = "schema"


class SourceError(RefusedError):
    """The input is no checkpoint of a kind that this operation reads."""

    code = "unsupported-source"


class TruncatedError(RefusedError):
    """A file ends before its own header says it does."""

    code = "truncated"


class MalformedError(RefusedError):
    """A file is not well-formed safetensors or JSON."""

    code = "malformed"


class OverlapError(RefusedError):
    """Two tensors of one shard share bytes."""

    code = "overlapping-data"


class LimitError(RefusedError):
    """A size limit of the specification is exceeded; nothing that large was read."""

    code = "limit"


class PathError(RefusedError):
    """A file name or link leads out of the checkpoint folder."""

    code = "path-escape"


class MissingFileError(RefusedError, FileNotFoundError):
    """A file or folder that must exist does not."""

    code = "missing-file"


class OutputExistsError(RefusedError, FileExistsError):
    """The destination is not empty, and may not be emptied."""

    code = "output-exists"


class WriteError(RefusedError, OSError):
    """The operating system refused a write; what was written of the output has been removed."""

    code = "write-failed"


class LossyError(RefusedError):
    """The conversion asked for would lose bits."""

    code = "lossy"


class UnknownSizeError(RefusedError):
    """The unpadded size of a module is not known, and the operation needs it."""

    code = "unknown-size"


class ScaleOverflowError(RefusedError):
    """A finite weight is too large for the requested dtype: its scales carry it past the largest value."""

    code = "scale-overflow"


class DependencyError(RefusedError, ImportError):
    """The operation needs an optional dependency that is not installed."""

    code = "missing-dependency"


class HubError(RefusedError):
    """The Hub refuses a request: no such repository or revision, no permission, a conflict, too many requests."""

    code = "hub"


class UnreachableError(RefusedError, ConnectionError):
    """The Hub cannot be reached, or does not answer in time; the same command may succeed later."""

    code = "hub-unreachable"


class UsageError(RefusedError):
    """The arguments do not make sense together."""

    code = "usage"


class InconsistentError(EspalierError):
    """The checkpoint can be read, but contradicts itself or its manifest."""

    exit_code = 1


class MissingTensorError(InconsistentError):
    """The config promises a tensor that no shard holds."""

    code = "missing-tensor"


class UnexpectedTensorError(InconsistentError):
    """A shard holds a quantized tensor that the config does not name."""

    code = "unexpected-tensor"


class DuplicateTensorError(InconsistentError):
    """Two tensors have one name, in different shards, or two names mean one place of a model."""

    code = "duplicate-tensor"


class DtypeError(InconsistentError):
    """A tensor has another dtype than the specification requires."""

    code = "dtype"


class ShapeError(InconsistentError):
    """A tensor has another shape than the config requires."""

    code = "shape"


class IndexMismatchError(InconsistentError):
    """``model.safetensors.index.json`` disagrees with the shard headers."""

    code = "index-mismatch"


class NonFiniteScaleError(InconsistentError):
    """``esp_suh`` or ``esp_svh`` holds an infinity or a NaN."""

    code = "non-finite-scale"


class BitsMismatchError(InconsistentError):
    """``bits`` or ``head_bits`` is not what the modules add up to."""

    code = "bits-mismatch"


class DigestError(InconsistentError):
    """A file size, file hash or decode digest differs from the manifest."""

    code = "digest-mismatch"


class SignatureError(InconsistentError):
    """The manifest has no signature by the given key."""

    code = "signature"
