"""Signatures of FlashAttention's functions and schemas of torch's operators as their releases write them, and calls
that are bound to them.

`python -m support.foreign_calls KERNEL VERSION FILE` adds the functions of a source file (of a source distribution or a
wheel, read as text) to flash_signatures.json; with KERNEL torch, the operators of a wheel's native_functions.yaml to
torch_schemas.json. Nothing of a foreign package is imported.
"""

import ast
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FILE = Path(__file__).with_name("flash_signatures.json")
SCHEMAS = Path(__file__).with_name("torch_schemas.json")
OPERATORS = (
    *("_flash_attention_forward", "_flash_attention_backward"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"),
    *("_fused_rms_norm", "_fused_rms_norm_backward", "addmm.dtype_out", "mm.dtype"),
)
FUNCTIONS = {
    "flash_attention_2": ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
    "flash_attention_3": ("_flash_attn_forward", "_flash_attn_backward"),
    "flash_attention_4": ("_flash_attn_fwd", "_flash_attn_bwd"),
}


def read_signatures(kernel: str, source: str) -> dict[str, list[list[Any]]]:
    """Returns of each function its parameters: [name, whether it has a default, whether it is keyword-only]."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS[kernel]:
            arguments = node.args
            positional = [*arguments.posonlyargs, *arguments.args]
            num_required = len(positional) - len(arguments.defaults)
            rows = [[each.arg, at >= num_required, False] for at, each in enumerate(positional)]
            pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            found[node.name] = rows + [[each.arg, default is not None, True] for each, default in pairs]
    assert found.keys() == set(FUNCTIONS[kernel])
    return found


def load_signatures() -> dict[str, dict[str, dict[str, list[list[Any]]]]]:
    loaded: dict[str, dict[str, dict[str, list[list[Any]]]]] = json.loads(FILE.read_text())
    return loaded


def make_module(kernel: str, version: str, calls: list[dict[str, Any]], answer: Callable[..., Any]) -> Any:
    """Returns a stand-in for the package's module. A call that the release would refuse is a TypeError."""

    def make(name: str) -> Callable[..., Any]:
        rows = load_signatures()[kernel][version][name]
        signature = inspect.Signature(
            [
                inspect.Parameter(
                    parameter,
                    inspect.Parameter.KEYWORD_ONLY if is_keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=None if has_default else inspect.Parameter.empty,
                )
                for parameter, has_default, is_keyword in rows
            ]
        )

        def call(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options).arguments
            calls.append(dict(bound))
            return answer(name, bound)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return SimpleNamespace(**{name: make(name) for name in FUNCTIONS[kernel]})


def read_schemas(source: str) -> dict[str, str]:
    """The operators' schemas in a native_functions.yaml, which names each in a line of its own."""
    lines = [line.removeprefix("- func: ") for line in source.splitlines() if line.startswith("- func: ")]
    found = {name: line for line in lines if (name := line.partition("(")[0]) in OPERATORS}
    assert found.keys() == set(OPERATORS)
    return found


def load_schemas() -> dict[str, dict[str, str]]:
    """By version of torch, and the operators of the installed one."""
    stored: dict[str, dict[str, str]] = json.loads(SCHEMAS.read_text())
    return {**stored, "installed": {name: str(get_installed_schema(name)) for name in OPERATORS}}


def get_installed_schema(name: str) -> Any:
    operator, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, operator), overload or "default")._schema


def bind_to_schema(schema: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Binds a call to the schema of one of torch's operators, as the dispatcher does."""
    kinds = inspect.Parameter
    parameters = [
        kinds(
            argument.name,
            kinds.KEYWORD_ONLY if argument.kwarg_only else kinds.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else kinds.empty,
        )
        for argument in schema.arguments
    ]
    return dict(inspect.Signature(parameters).bind(*args, **options).arguments)


def main() -> None:
    kernel, version, file = sys.argv[1:]
    if kernel == "torch":
        schemas = json.loads(SCHEMAS.read_text()) if SCHEMAS.exists() else {}
        schemas[version] = read_schemas(Path(file).read_text())
        SCHEMAS.write_text(json.dumps(schemas, sort_keys=True, indent=1) + "\n")
        return
    content = load_signatures() if FILE.exists() else {}
    content.setdefault(kernel, {})[version] = read_signatures(kernel, Path(file).read_text())
    FILE.write_text(json.dumps(content, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
