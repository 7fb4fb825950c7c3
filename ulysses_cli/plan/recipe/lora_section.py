"""The recipe's `lora` section: adapters on a model that stays as it is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ulysses_cli.plan.recipe.setting import Section, setting, text


class Lora(Section):
    """Train small adapters and leave the model as it is."""

    r: int = setting(16, "rank of the adapters", unit="dimensions", aliases=("lora_r",), ge=1, le=65536)
    alpha: float = setting(32.0, "scale of the adapters, times 1 / r", unit="x", aliases=("lora_alpha",), gt=0, le=1e6)
    dropout: float = setting(0.0, "dropout before the adapters", unit="share", aliases=("lora_dropout",), ge=0, lt=1)
    target_modules: Annotated[tuple[str, ...], Field(min_length=1, max_length=1000)] | Literal["all-linear"] = setting(
        "all-linear",
        "linear layers that get an adapter, by the last part of their name",
        unit="names",
        aliases=("lora_target_modules",),
    )
    use_rslora: bool = setting(False, "scale the adapters by alpha / sqrt(r) instead of alpha / r")
    use_dora: bool = setting(False, "also train the length of each row of the adapted weights (DoRA)")
    modules_to_save: tuple[Literal["embed_tokens", "lm_head", "norm"], ...] = setting(
        (),
        "parts that are trained whole beside the adapters and saved with them: embedding, head, all norms",
        unit="names",
        max_length=3,
        aliases=("lora_modules_to_save",),
        spellings={None: (), "none": ()},
    )
    quantize_base: Literal["nf4", "int8"] | None = setting(
        None,
        "hold the frozen linear layers in 4 or 8 bits, by bitsandbytes; each GPU holds the whole base",
        unit="format",
        spellings={False: None, "none": None, "4bit": "nf4", "8bit": "int8"},
        refused={"fp4": "nf4 takes the same memory and is closer to the weights"},
    )
    adapter_name_or_path: str | None = text(
        None, "adapters to start from: a hub name or local folder that peft has written"
    )
