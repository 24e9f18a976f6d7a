"""Loading of YAML, overrides and defaults into one tree, and errors that say which key, which value and what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

Model = TypeVar("Model", bound=BaseModel)

_TYPE_NAMES = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "keys with values",
    "finite_number": "a finite number",
}


class ConfigError(ValueError):
    """The configuration is wrong; the message is meant for the person who wrote it."""


def load_tree(schema: type[BaseModel], source: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> dict:
    """Defaults, then the base file, then the recipe, then the overrides, with interpolations resolved.

    Raises:
        ConfigError: unreadable YAML, a missing file, an override without ``=``, an interpolation of an unknown key.
    """
    layers = [OmegaConf.create(_defaults(schema)), *_recipe(source), *(_override(item) for item in overrides)]
    try:
        tree = OmegaConf.to_container(OmegaConf.merge(*layers), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'configuration'}: {str(error).splitlines()[0]}") from error
    assert isinstance(tree, dict)
    return tree


def validate(schema: type[Model], tree: Mapping[str, Any]) -> Model:
    """The typed configuration.

    Raises:
        ConfigError: one line per problem.
    """
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        lines = [line for detail in error.errors() for line in _explain(schema, detail).splitlines()]
        raise ConfigError("\n".join(lines)) from error


def resolved_yaml(config: BaseModel) -> str:
    """The whole configuration as YAML that loads to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump()))


def load_object(key: str, path: str) -> Any:
    """The object that the configuration key names by import path.

    Raises:
        ConfigError: the module or the attribute does not exist.
    """
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not module_name.startswith(error.name or "\0"):
            raise
        raise ConfigError(f"{key} = {path!r}: there is no module {error.name!r} on the Python path") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {module_name}.{near[0]}?" if near else ""
        raise ConfigError(f"{key} = {path!r}: module {module_name} has no {attribute!r}{hint}")
    if not callable(found := getattr(module, attribute)):
        raise ConfigError(f"{key} = {path!r}: this is {found!r}, expected a function or a class")
    return found


@contextmanager
def blame(key: str, value: object, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors about the thing that a key names into a ConfigError that says which key that is."""
    try:
        yield
    except errors as error:
        raise ConfigError(f"{key} = {value!r}: {error}") from error


def _defaults(schema: type[BaseModel]) -> dict[str, Any]:
    """Defaults as a tree, so that a partial override refines a default section and interpolation sees every key."""
    tree: dict[str, Any] = {}
    for name, field in schema.model_fields.items():
        if field.is_required():
            if section := _section(field.annotation):
                tree[name] = _defaults(section)
            continue
        default = field.get_default(call_default_factory=True)
        tree[name] = default.model_dump() if isinstance(default, BaseModel) else default
    return tree


def _recipe(source: str | Path | Mapping[str, Any]) -> list[DictConfig]:
    if isinstance(source, Mapping):
        return [OmegaConf.create(dict(source))]
    path = Path(source)
    recipe = _read(path)
    base = recipe.pop("base", None)
    if base is None:
        return [recipe]
    if not isinstance(base, str):
        raise ConfigError(f"base = {base!r} in {path}: expected the name of one YAML file")
    parent = _read(path.parent / base)
    if "base" in parent:
        raise ConfigError(f"base = {base!r} in {path}: that file names a base of its own, and there may be only one")
    return [parent, recipe]


def _read(path: Path) -> DictConfig:
    if not path.is_file():
        raise ConfigError(f"there is no configuration file {str(path)!r}")
    try:
        content = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path} holds a list, expected sections and keys")
    return content


def _override(item: str) -> DictConfig:
    key, equals, _ = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {item!r}: expected key=value, such as gconfig.n_samples=4")
    try:
        return OmegaConf.from_dotlist([item])
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"override {item!r}: {str(error).splitlines()[0]}") from error


def _explain(schema: type[BaseModel], detail: ErrorDetails) -> str:
    """One sentence for one error of pydantic: key, value, what was expected and where to look."""
    path = [str(part) for part in detail["loc"] if part != "[key]"]
    key, value, kind = ".".join(path), detail["input"], detail["type"]
    if kind == "extra_forbidden":
        return f"unknown key {key!r} (value {value!r}): {_suggestion(schema, path)}"
    if kind == "missing":
        description = _description(schema, path)
        return f"{key} is required{': ' + description if description else ''}"
    if kind == "value_error":
        message = str(detail["ctx"]["error"])
        if isinstance(value, Mapping | BaseModel):
            return f"{key}: {message}" if key else message
        return f"{key} = {value!r}: {message}"
    if kind == "model_type":
        section = _section_at(schema, path)
        return f"{key} = {value!r}: expected a section with keys {', '.join(section.model_fields) if section else '…'}"
    if kind == "string_pattern_mismatch":
        what = "a dotted import path such as package.module.name" if "\\." in detail["ctx"]["pattern"][:30] else None
        return f"{key} = {value!r}: expected {what or 'letters, digits, dots, dashes and underscores'}"
    near = difflib.get_close_matches(str(value), _choices(schema, path), n=1)
    return f"{key} = {value!r}: expected {_expected(schema, path, detail)}" + (
        f"; did you mean {near[0]!r}?" if near else ""
    )


def _expected(schema: type[BaseModel], path: list[str], detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Input should be ").replace("String should have", "text with")
    what = _TYPE_NAMES.get(detail["type"], message)
    if "than" in detail["type"]:
        what = f"a number {what}"
    return what + (" or null" if type(None) in get_args(_annotation(schema, path)) else "")


def _choices(schema: type[BaseModel], path: list[str]) -> list[str]:
    """The texts a Literal field takes."""
    annotation = _annotation(schema, path)
    literals = [annotation, *get_args(annotation)]
    return [str(choice) for literal in literals if get_origin(literal) is Literal for choice in get_args(literal)]


def _suggestion(schema: type[BaseModel], path: list[str]) -> str:
    """Where an unknown key probably belongs: the nearest name beside it, the same name elsewhere, or any near name."""
    *section_path, name = path
    section = _section_at(schema, section_path) or schema
    prefix = ".".join([*section_path, ""])
    if near := difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.7):
        return f"did you mean {prefix + near[0]!r}?"
    leaves: dict[str, list[str]] = {}
    for key in _keys(schema):
        leaves.setdefault(key.rpartition(".")[2], []).append(key)
    if elsewhere := difflib.get_close_matches(name, leaves, n=1, cutoff=0.85):
        return f"did you mean {' or '.join(map(repr, leaves[elsewhere[0]][:3]))}?"
    where = f"section {'.'.join(section_path)!r}" if section_path else "the top level"
    return f"{where} has {', '.join(section.model_fields)}"


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield prefix + name
        if section := _section(field.annotation):
            yield from _keys(section, f"{prefix}{name}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section class of a field's type, looking through ``| None``."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _section_at(schema: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = schema
    for name in path:
        field = section.model_fields.get(name) if section else None
        section = _section(field.annotation) if field else None
    return section


def _annotation(schema: type[BaseModel], path: Sequence[str]) -> Any:
    section = _section_at(schema, path[:-1])
    field = section.model_fields.get(path[-1]) if section else None
    return field.annotation if field else None


def _description(schema: type[BaseModel], path: Sequence[str]) -> str | None:
    section = _section_at(schema, path[:-1])
    return section.model_fields[path[-1]].description if section else None
