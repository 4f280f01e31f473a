"""Which models can be converted: one declarative file per family."""

from .family import Block, Column, Family, Join, Part, Row, Units, family_of

__all__ = ["Block", "Column", "Family", "Join", "Part", "Row", "Units", "family_of"]
