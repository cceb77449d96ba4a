"""Recipes: typed, frozen descriptions of whole runs."""

from functitan.recipes.base import DataConfig, Family, OptimConfig, Recipe, settings
from functitan.recipes.muon import MuonConfig
from functitan.recipes.overrides import override, parse_mesh, with_mesh
from functitan.recipes.registry import RECIPES, load_recipe

__all__ = [
    "RECIPES",
    "DataConfig",
    "Family",
    "MuonConfig",
    "OptimConfig",
    "Recipe",
    "load_recipe",
    "override",
    "parse_mesh",
    "settings",
    "with_mesh",
]
