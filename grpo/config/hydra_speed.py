"""Makes Hydra compose the same configuration in half the time, and a run's once instead of twice; and lets it read letters
that are not ASCII without quotes.

Three functions of hydra-core 1.3 and omegaconf 2.3 waste most of the time of a composition, and none has a public setting:

- `omegaconf._utils.get_yaml_loader`: YAML is read in Python, although libyaml is there;
- `hydra._internal.defaults_list._create_interpolation_map`: a table of all choices is made for each of some 50 files, although
  hardly any default refers to it;
- `hydra._internal.config_loader_impl.ConfigLoaderImpl.load_configuration`: a run is composed first for `hydra.mode` alone.

Its grammar has 26 letters, so `task.path=größe.csv` is a mistake to it. `overrides_parser.InputStream` is what its lexer reads.

Each is private, so each is replaced only if it is there; otherwise Hydra composes as slowly as before.
`tests/config/test_hydra_speed.py` compares the results with those of Hydra alone.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig


def by_libyaml(rules: Callable[[], type]) -> Callable[[], type]:
    """libyaml finds the words, OmegaConf's rules say what they are. A tab after a colon, which PyYAML refuses, is read."""
    from yaml import YAMLError, constructor, resolver
    from yaml.cyaml import CParser  # an ImportError without libyaml

    @functools.cache
    def loader() -> type:
        python: Any = rules()

        class Loader(CParser, python):
            def __init__(self, stream: Any) -> None:
                self.source = stream
                CParser.__init__(self, stream)
                constructor.SafeConstructor.__init__(self)
                resolver.Resolver.__init__(self)

            def get_single_data(self) -> Any:
                try:
                    return super().get_single_data()
                except YAMLError:  # Python words it better
                    if hasattr(self.source, "seek"):
                        self.source.seek(0)
                    return python(self.source).get_single_data()

        return Loader

    return loader


def if_referred_to(table: Callable[..., DictConfig]) -> Callable[..., DictConfig | None]:
    """The table of choices is for defaults such as `recipe: ${model}_${adapter}`."""

    def choices(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig | None:
        refer = any(default.is_interpolation() for default in defaults if not default.is_self())
        return table(overrides, defaults, self_added) if refer else None

    return choices


def once(load: Callable[..., DictConfig]) -> Callable[..., DictConfig]:
    """The configuration that was composed to find the mode, or the error, is the run's. Hydra adds at most one word, the mode."""
    latest: list[Any] = []  # what was asked, and the answer

    def loaded(
        self: Any,
        config_name: str,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        mode = f"hydra.mode={run_mode.name}"
        words = overrides[:-1] if overrides[-1:] == [mode] else overrides
        if not validate_sweep_overrides:  # Hydra asks for the mode
            latest.clear()
            try:
                answer: Any = load(self, config_name, overrides, RunMode.RUN, from_shell, False)
            except Exception as error:
                if str(error).startswith("You must specify"):  # a sweep may do without it
                    return load(self, config_name, overrides, run_mode, from_shell, False)
                answer = error
            latest[:] = [self, config_name, *overrides], answer
        elif latest[:1] == [[self, config_name, *words]]:
            self.validate_sweep_overrides_legal(OverridesParser.create().parse_overrides(words), run_mode, from_shell)
            answer = latest[1]
            latest.clear()
            if isinstance(answer, DictConfig) and words != overrides:
                answer.hydra.mode = run_mode
                answer.hydra.overrides.hydra.append(mode)
        else:
            return load(self, config_name, overrides, run_mode, from_shell)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return loaded


def every_letter(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """For the lexer every character beyond ASCII that is no space is the letter x, which no word of the grammar has, as `nan` or
    `null`. Tokens have the characters themselves."""

    def stream(text: str) -> Any:
        made = read(text)
        made.data = [ord("x") if ord(char) > 127 and char.isprintable() else ord(char) for char in text]
        return made

    return stream


REPLACED = {
    "omegaconf._utils:get_yaml_loader": by_libyaml,
    "hydra._internal.defaults_list:_create_interpolation_map": if_referred_to,
    "hydra._internal.config_loader_impl:ConfigLoaderImpl.load_configuration": once,
    "hydra.core.override_parser.overrides_parser:InputStream": every_letter,
}


def hasten(replaced: Mapping[str, Callable[..., Any]]) -> None:
    """Replace the functions at these places by what is made of them; what is not there stays as it is."""
    for place, faster in replaced.items():
        with suppress(ImportError, AttributeError):
            original = resolve_name(place)
            owner, _, name = place.replace(":", ".").rpartition(".")
            setattr(resolve_name(owner), name, functools.wraps(original)(faster(original)))
