"""Plans that reach any TextCraft goal from an empty inventory: demonstrations, and proof that a goal can be reached."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from agentgym_rl.envs.textcraft.environment import Ingredient, Recipe, RecipeBook, recipe_book


@dataclass(frozen=True, slots=True)
class _Craft:
    """Use ``recipe``, which names concrete items only, ``times`` times."""

    recipe: Recipe
    times: int


def plan(goal: str) -> list[str]:
    """Actions that craft ``goal``: one ``get`` per raw item, then the crafts from the simplest product up.

    Deterministic; uses only recipes that the episode of the goal shows. Raises KeyError when no recipe makes ``goal``.
    """
    crafts, raw = _requirements(goal, recipe_book())
    gets = [f"get {count} {item}" for item, count in raw.items()]
    return gets + [craft.recipe.command for craft in reversed(crafts) for _ in range(craft.times)]


def _requirements(goal: str, book: RecipeBook) -> tuple[list[_Craft], Counter[str]]:
    """Crafts from the goal down, and the raw items they take in all."""
    demand, raw, crafts = Counter({goal: 1}), Counter[str](), list[_Craft]()
    while demand:
        # Deepest first: ingredients are always less deep, so all that need an item are known when its turn comes. Of
        # equally deep ones the first that was needed, so that raw items come in the order in which recipes name them.
        item = max(demand, key=lambda name: book.depth[name])
        count = demand.pop(item)
        if item in book.raw_items:
            raw[item] = count
            continue
        recipe = _concrete(min(book.by_item[item], key=book.recipe_depth), demand, book)
        craft = _Craft(recipe, math.ceil(count / recipe.count))
        crafts.append(craft)
        for ingredient in recipe.ingredients:
            demand[ingredient.name] += ingredient.count * craft.times
    return crafts, raw


def _concrete(recipe: Recipe, demand: Counter[str], book: RecipeBook) -> Recipe:
    """``recipe`` with one item in the place of each tag: the easiest, and among those one that is needed anyway."""

    def item_for(ingredient: Ingredient) -> str:
        if not ingredient.is_tag:
            return ingredient.name
        makeable = (item for item in book.tags[ingredient.name] if item in book.by_item)
        return min(makeable, key=lambda item: (book.depth[item], item not in demand, item))

    inputs = tuple(Ingredient(item_for(ingredient), ingredient.count) for ingredient in recipe.ingredients)
    return Recipe(recipe.item, recipe.count, inputs, recipe.tag)
