"""Converters between checkpoint formats."""
