"""What mypy must refuse: each line marked with the error that it is to find."""

from __future__ import annotations

import espalier_format as ef
from espalier_format.operations.convert import convert_checkpoint

convert_checkpoint("a", "b", to="gguf")  # error: arg-type
checkpoint = ef.open_checkpoint("a")
checkpoint.format = "exl3"  # error: misc
checkpoint.decode("m", "int8")  # error: call-overload
ef.plan(3)  # error: arg-type
ef.plan("a").rank(0, 2, str.lower)  # error: arg-type
print(ef.get_codebook("int5@3").half_step)  # error: attr-defined
