"""The paths of the checkout and its recipes."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
TINY_RECIPE = RECIPES / "tiny-cpu.yaml"
