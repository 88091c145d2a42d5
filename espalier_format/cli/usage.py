"""The usage line of a command, in one form whatever the release of typer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer.core import TyperCommand

if TYPE_CHECKING:
    import typer


class PlainUsageCommand(TyperCommand):
    """Writes a required argument as SRC, where some releases of typer write {SRC}."""

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override] # click is vendored in some releases
        """Return the words of the usage line after the program's name."""
        return [
            piece[1:-1] if piece.startswith("{") and piece.endswith("}") else piece
            for piece in super().collect_usage_pieces(ctx)
        ]
