"""Makes prompters as the product does: with the model's chat template rendered in a bounded child process."""

from contextlib import closing
from typing import Any

from ulysses_cli.data.tokenizing.renderer import Renderer
from ulysses_cli.evaluate.prompts import Prompter


def make_prompter(tokenizer: Any, **options: Any) -> Prompter:
    with closing(Renderer(tokenizer)) as renderer:
        return Prompter(tokenizer, renderer.render_text, **options)
