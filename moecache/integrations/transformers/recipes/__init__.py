"""Recipes of transformers' models: what the decode step computes in the place of their modules.

A family is named by the classes of its attention and of its block of experts, and by nothing else:
a module that merely looks like another is not guessed to be one.
"""

from moecache.integrations.transformers.recipes._reading import (
    NoRecipeError,
    Reading,
    UnknownFamilyError,
    read_recipe,
)

__all__ = ["NoRecipeError", "Reading", "UnknownFamilyError", "read_recipe"]
