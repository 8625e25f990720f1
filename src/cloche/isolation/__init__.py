"""The walls: backends that make cells."""
