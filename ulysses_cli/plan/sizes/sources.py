"""Runs Python files of transformers under a stand-in for torch. Such a file reaches no file, network or process: it
imports the stand-in, other such files, and modules of Python's library that compute."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from functools import cache, wraps
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any

from ulysses_cli.plan.sizes import nn
from ulysses_cli.plan.sizes.library import Namespace, Nothing, Unknown, make_torch
from ulysses_cli.plan.sizes.tensor import UnknownOperator

COMPUTING = frozenset(
    {
        "__future__", "abc", "bisect", "collections", "contextlib", "contextvars", "copy", "dataclasses", "enum",
        "functools", "inspect", "itertools", "math", "numbers", "operator", "re", "string", "types", "typing",
        "typing_extensions", "warnings",
    }
)  # fmt: skip
BLOCKED = ("open", "eval", "exec", "compile", "input", "breakpoint", "exit", "quit")
# Files of transformers that run beside those of models.
RUNNING = frozenset(
    {
        "activations", "configuration_utils", "integrations.heterogeneity.configuration_utils", "integrations.moe",
        "modeling_layers", "modeling_rope_utils",
    }
)  # fmt: skip
MOVED = {"integrations.heterogeneity": "integrations.heterogeneity.configuration_utils"}
# This package's own files may import the rest of it, and more of Python's library.
OWN, OF_OWN = "sizes_of.ulysses_cli", ("concurrent", "mmap", "threading", "ulysses_cli", "weakref")
ATTENTION = "sizes"  # the name of attention's implementation


class Output:
    """What a model returns: any of transformers' model outputs. A part that is not there is None."""

    def __new__(cls, *_: Any, **parts: Any) -> Output:
        made = super().__new__(Output)
        vars(made).update(parts)  # a class of a model's own has fields of its own too
        return made

    def __init__(self, **_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: int) -> Any:
        return [part for part in vars(self).values() if part is not None][index]


class Interface(dict[str, Any]):
    """transformers.utils.generic.GeneralInterface"""

    _global_mapping: Mapping[str, Any] = {}

    def __init__(self) -> None:
        super().__init__(self._global_mapping)


class SharedKeys(dict[Any, Any]):
    """transformers.cache_utils.KVSharingDict: keys and values that later layers use again."""

    def __init__(self, past: Any = None) -> None:
        super().__init__(past or {})


class Attentions(dict[str, Any]):
    """transformers' interface of attention implementations, by name."""

    def register(self, name: str, attend: Callable[..., Any]) -> None:
        self[name] = attend

    def get_interface(self, name: str, default: Any) -> Any:
        return self[name]


class Quiet:
    """A logger that says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class PreTrainedModel(nn.SizedModule):
    config_class: Any = None
    _tied_weights_keys: Any = None

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.config = config

    def post_init(self) -> None: ...

    @classmethod
    def _from_config(cls, config: Any, **_: Any) -> Any:
        return cls(config)

    @property
    def dtype(self) -> Any:
        return next(self.parameters()).dtype

    @property
    def device(self) -> Any:
        return next(self.parameters()).device

    def get_decoder(self) -> Any:
        return self.model if "model" in self._modules else self

    def get_input_embeddings(self) -> Any:
        return next(module for module in self.modules() if isinstance(module, nn.Embedding))

    def get_output_embeddings(self) -> Any:
        return self._modules.get("lm_head")

    def tie_weights(self) -> None:
        """Weights that transformers ties, here and in models inside: by name, or by a pattern for several."""
        for model in self.modules():
            if isinstance(model, PreTrainedModel) and getattr(model.config, "tie_word_embeddings", False):
                _tie(model, model._tied_weights_keys or {})


def _tie(model: PreTrainedModel, keys: Mapping[str, str]) -> None:
    names = [
        f"{path}.{name}" if path else name for path, module in model.named_modules() for name in module._parameters
    ]
    for own, other in keys.items():
        for name in names:
            if match := re.match(own, name):
                path, _, last = name.rpartition(".")
                source, _, source_last = (other + name[match.end() :]).rpartition(".")
                model.get_submodule(path)._parameters[last] = getattr(model.get_submodule(source), source_last)


def pass_through(*args: Any, **_: Any) -> Any:
    """A decorator, or what makes one from options."""
    return args[0] if len(args) == 1 and callable(args[0]) else lambda decorated: decorated


def make_decorator(*_: Any, **__: Any) -> Any:
    return lambda decorated: decorated


def make_wrapper(*_: Any, **__: Any) -> Any:
    """Of functions for which packages have kernels: others may stand for them."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            return function(*args, **named)

        return run

    return decorate


def give_default(*_: Any, **__: Any) -> Callable[..., Any]:
    """transformers.utils.type_validators: a field whose values are checked."""
    return lambda default=None, default_factory=None, **_: (
        default if default_factory is None else field(default_factory=default_factory)
    )


EXECUTED: set[str] = set()  # files of transformers, in this process


class Executed:
    """A module, what it holds when a run begins, and its own functions that keep results."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.held = module, dict(vars(module))
        kept = (value for value in self.held.values() if hasattr(value, "cache_clear"))
        self.cached = [value for value in kept if value.__module__ == module.__name__]


class ModelSources:
    """One set of executed files: transformers', and this package's own that compute with torch. `attend`: attention as
    transformers' layers call it; `given`: what stands for modules of other packages."""

    def __init__(
        self, attend: Callable[..., Any] | None = None, given: Mapping[str, ModuleType] = MappingProxyType({})
    ) -> None:
        self.torch = make_torch()
        self.modules: dict[str, ModuleType] = {}
        self.executed: list[Executed] = []
        self.root = find_package()
        self.own: dict[str, ModuleType] = {}
        self.builtins = {name: value for name, value in vars(builtins).items() if name not in BLOCKED}
        self.builtins["__import__"] = self._import
        self.given, self.attentions = given, Attentions({ATTENTION: attend})
        no_mask = lambda *_, **__: None  # noqa: E731 - documents decide which tokens see which
        self.names: dict[str, Any] = {
            "ALL_ATTENTION_FUNCTIONS": self.attentions,
            "AttentionInterface": self.attentions, "PreTrainedModel": PreTrainedModel, "GeneralInterface": Interface,
            "Cache": type("Cache", (), {}), "DynamicCache": type("DynamicCache", (), {}),
            "GenerationMixin": type("GenerationMixin", (), {}), "TransformersKwargs": dict,
            "FlashAttentionKwargs": dict, "slice_logits_to_keep": lambda hidden, *_: hidden, "interval": give_default,
            "create_causal_mask": no_mask, "create_sliding_window_causal_mask": no_mask,
            "create_recurrent_attention_mask": no_mask, "create_chunked_causal_mask": no_mask,
            "create_masks_for_generate": lambda *_, **__: {}, "maybe_autocast": Nothing,
            "is_torch_available": lambda: True, "is_torchdynamo_compiling": lambda *_, **__: False,
            "is_torchdynamo_exporting": lambda *_: False, "is_torch_greater_or_equal": lambda *_, **__: True,
            "is_torch_less_or_equal": lambda *_, **__: False, "torch_compilable_check": lambda *_, **__: None,
            "is_flash_attention_requested": lambda *_, **__: False, "is_tracing": lambda *_: False,
            "logging": Namespace("logging", get_logger=lambda _: Quiet()), "is_timm_config_dict": lambda _: False,
            "copy_func": lambda f: f,
            "KVSharingDict": SharedKeys,
            "PushToHubMixin": type("PushToHubMixin", (), {"push_to_hub": lambda self: None}),
        }  # fmt: skip
        for name in ("auto_docstring", "can_return_tuple", "capture_outputs", "merge_with_config_defaults", "strict"):
            self.names[name] = pass_through
        self.names["use_kernel_func_from_hub_with_fallback"] = make_wrapper
        for name in (
            "use_kernel_forward_from_hub", "use_kernelized_func", "force_accelerate_hooks", "dataclass_transform",
        ):  # fmt: skip
            self.names[name] = make_decorator

    def load(self, name: str) -> ModuleType:
        """The module of that name below transformers."""
        name = MOVED.get(name, name)
        if name in self.modules:
            return self.modules[name]
        path = self.root / (name.replace(".", "/") + ".py")
        module = ModuleType(f"sizes_of.transformers.{name}")
        vars(module).update({"__builtins__": self.builtins, "__file__": str(path)})
        self.modules[name] = module
        sys.modules[module.__name__] = module  # dataclasses look there
        exec(_compile(path), vars(module))
        EXECUTED.add(str(path))
        if name == "integrations.moe":
            module._grouped_mm = self.torch["torch"]._grouped_mm  # type: ignore[attr-defined]
        self.executed.append(Executed(module))
        return module

    def load_own(self, name: str) -> ModuleType:
        """One of this package's modules that compute with torch."""
        if name in self.own:
            return self.own[name]
        path = Path(__file__).parents[3] / (name.replace(".", "/") + ".py")
        module = ModuleType(f"sizes_of.{name}")
        vars(module).update({"__builtins__": self.builtins, "__file__": str(path)})
        self.own[name] = module
        sys.modules[module.__name__] = module
        exec(_compile(path), vars(module))
        self.executed.append(Executed(module))
        return module

    def keep_changes(self) -> None:
        """What was replaced in modules so far stays replaced."""
        self.executed = [Executed(each.module) for each in self.executed]

    def forget_run(self) -> None:
        """Undoes what a run changed in modules, and empties their caches, which may hold its tensors. Another set of
        files may have modules of the same names: layers find theirs by name."""
        for each in self.executed:
            sys.modules[each.module.__name__] = each.module
            for function in each.cached:
                function.cache_clear()
            vars(each.module).clear()
            vars(each.module).update(each.held)
        for name in [name for name in self.attentions if name != ATTENTION]:
            del self.attentions[name]

    def _find_own(self, name: str, wanted: Any) -> Any:
        if not (Path(__file__).parents[3] / name.replace(".", "/") / "__init__.py").is_file():
            return self.load_own(name)
        return Namespace(name, **{each: self.load_own(f"{name}.{each}") for each in wanted})

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name in self.given:
            return self.given[name]
        if name.partition(".")[0] == "torch":
            found = self.torch.get(name) or Namespace(name)
            return found if fromlist else self.torch["torch"]
        if name.startswith(("ulysses_cli.train", "ulysses_cli.prove.trace")):
            return self._find_own(name, fromlist or ())
        if level or name.partition(".")[0] == "transformers":
            if level:
                own = (globals or {})["__name__"].removeprefix("sizes_of.transformers.").split(".")
                name = ".".join(filter(None, [*own[: len(own) - level], name]))
            else:
                name = name.partition(".")[2]
            return self._find_names(name, fromlist or ())
        is_own = str((globals or {}).get("__name__")).startswith(OWN)
        if is_own and name == "sys":
            return Namespace("sys", modules=sys.modules)  # where it finds the module of a layer's class
        if name.partition(".")[0] in (*COMPUTING, *(OF_OWN if is_own else ())):
            return importlib.__import__(name, globals, locals, fromlist, level)
        return Namespace(name, **{each: self.names[each] for each in fromlist or () if each in self.names})

    def _find_names(self, name: str, wanted: Any) -> Any:
        """The names that a file imports from a module of transformers."""
        module: Any = None
        runs = name in RUNNING or name in MOVED
        if runs or (name.startswith("models.") and name.rpartition(".")[2].startswith(("modeling_", "configuration_"))):
            module = (
                self.load(name) if (self.root / (MOVED.get(name, name).replace(".", "/") + ".py")).is_file() else None
            )
        found = {}
        for each in wanted:
            if module is not None and hasattr(module, each):
                found[each] = getattr(module, each)
            elif each in self.names:
                found[each] = self.names[each]
            elif name == "integrations" and each == "use_experts_implementation":
                found[each] = self.load("integrations.moe").use_experts_implementation
            elif name == "configuration_utils" and each in ("PreTrainedConfig", "PretrainedConfig"):
                found[each] = self.load(name).PreTrainedConfig
            elif name in ("modeling_outputs", "utils", "utils.generic") and "Output" in each:
                found[each] = Output
            else:
                found[each] = Unknown(f"transformers.{name}.{each}")
        return Namespace(f"transformers.{name}", **found)


@cache
def find_package() -> Path:
    """transformers' folder, without importing it."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("transformers is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def _compile(path: Path) -> CodeType:
    """Takes the compiled file beside it, as an import does."""
    code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
    if code is None:
        raise ImportError(f"{path} has no code")
    return code


@cache
def _read_table(file: str, name: str) -> dict[str, str]:
    """One of transformers' tables of names by model type."""
    text = (find_package() / "models" / "auto" / file).read_text(encoding="utf-8")
    start = text.index(f"\n{name} = ")
    return dict(re.findall(r"\(\s*\"([\w-]+)\",\s*\"(\w+)\"", text[start : text.index("\n)", start)]))


def find_folder(model_type: str) -> str:
    """The folder of a model type's files, which parts of a multimodal model share."""
    folder = _read_table("auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME").get(model_type)
    return folder or model_type.replace("-", "_")


def _load_config_class(sources: ModelSources, model_type: str) -> Any:
    name = _read_table("auto_mappings.py", "CONFIG_MAPPING_NAMES").get(model_type)
    if name is None:
        raise UnknownOperator(f"a model of type {model_type}, which transformers does not have")
    folder = find_folder(model_type)
    return getattr(sources.load(f"models.{folder}.configuration_{folder}"), name)


@cache
def read_defaults(model_type: str) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The fields of a model's configuration with their defaults, and names by which transformers also reads them. None
    of a model that the installed transformers does not have."""
    try:
        config_class = _load_config_class(_open_configs(), model_type)
    except UnknownOperator:
        return {}, frozenset()
    names = {each.name for each in fields(config_class)}
    defaults = {each.name: each.default for each in fields(config_class) if each.default is not MISSING}
    pairs = ({*pair} for pair in config_class.attribute_map.items())
    return defaults, frozenset(name for pair in pairs if pair & names for name in pair - names)


_open_configs = cache(ModelSources)


def make_config(sources: ModelSources, values: Mapping[str, Any]) -> Any:
    """transformers' own configuration of config.json's content."""
    config_class = _load_config_class(sources, str(values["model_type"]))
    config = config_class(**{name: value for name, value in values.items() if name != "model_type"})
    _fill_factors(config)
    config._attn_implementation = ATTENTION
    config._experts_implementation = "grouped_mm"
    return config


def _fill_factors(config: Any) -> None:
    """Known models leave out the factors by which longrope stretches: their number is all that sizes need."""
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        factors = [1.0] * (int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2)
        for name in ("long_factor", "short_factor"):
            rope.setdefault(name, factors)


def make_model(sources: ModelSources, config: Any) -> Any:
    """The causal model of a configuration, with weights of sizes alone."""
    table = _read_table("modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    name = table.get(config.model_type)
    if name is None:
        raise UnknownOperator(f"a causal model of type {config.model_type}, which transformers does not have")
    for known in (config.model_type, *(each for each, other in table.items() if other == name)):
        folder = find_folder(known)
        if (find_package() / "models" / folder / f"modeling_{folder}.py").is_file():
            model = getattr(sources.load(f"models.{folder}.modeling_{folder}"), name)(config)
            model.tie_weights()
            return model
    raise UnknownOperator(f"{name}, whose file transformers does not have")
