"""`python -m ulysses_cli.train.export.sampling`: continues prompts with an exported model or adapters, by
transformers' own greedy generation in one process. Reads a request and writes the answers as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ulysses_cli.data.tokenizing.renderer import TemplateProblem
from ulysses_cli.data.tokenizing.tokenizer import get_variables, list_stop_tokens
from ulysses_cli.plan.problem import FAILED
from ulysses_cli.plan.secrets import collect_secrets, mask_text
from ulysses_cli.train.evaluation import encode_prompts
from ulysses_cli.train.export.weights import BASE_CONFIG
from ulysses_cli.train.model.loading import first_line, grow_embeddings


def load_model(name: str, options: dict[str, Any]) -> Any:
    """A model, or adapters on their base as it was trained: with its stretched positions and added tokens."""
    folder = Path(name)
    if not (folder / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(name, **options)
    from peft import PeftConfig, PeftModel

    base = str(PeftConfig.from_pretrained(name).base_model_name_or_path)
    config = AutoConfig.from_pretrained(folder / BASE_CONFIG if (folder / BASE_CONFIG).is_dir() else base)
    wanted, own = config.vocab_size, AutoConfig.from_pretrained(base).vocab_size
    config.vocab_size = own
    model: Any = AutoModelForCausalLM.from_pretrained(base, config=config, **options)
    if wanted > own:
        grow_embeddings(model, wanted)
    return PeftModel.from_pretrained(model, name)


@torch.no_grad()
def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answers, whether the model has a chat template, its positions, and how many the longest text took."""
    trust = {"trust_remote_code": bool(request["trust_remote_code"])}
    tokenizer: Any = AutoTokenizer.from_pretrained(request["model"], **trust)
    if request["as_chat"] and tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template: leave out --chat")
    device = "auto" if torch.cuda.is_available() and request["device"] != "cpu" else "cpu"
    dtype = getattr(torch, request["dtype"]) if request["dtype"] else "auto"
    model = load_model(request["model"], {"dtype": dtype, "device_map": device, **trust}).eval()
    stop_tokens, answers, longest = list_stop_tokens(tokenizer, model), [], 0
    variables = get_variables(tokenizer)
    for prompt in encode_prompts(tokenizer, request["prompts"], as_chat=request["as_chat"], variables=variables):
        ids = torch.tensor([prompt.tokens], device=next(model.parameters()).device)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["max_new_tokens"],
            do_sample=False,
            num_beams=1,
            eos_token_id=sorted(stop_tokens) or None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        )
        longest = max(longest, out.size(1))
        tokens = [token for token in out[0, ids.size(1) :].tolist() if token not in stop_tokens]
        answers.append({"prompt": prompt.text, "text": tokenizer.decode(tokens), "num_tokens": len(tokens)})
    positions = getattr(model.config, "max_position_embeddings", None)
    facts = {"has_template": tokenizer.chat_template is not None, "longest": longest, "num_positions": positions}
    return {"answers": answers, **facts}


def main() -> int:
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what libraries print is no result
        try:
            result = answer(request)
        except (OSError, ValueError, RuntimeError, KeyError, ImportError, TemplateProblem) as error:
            result = {"problem": mask_text(first_line(error), collect_secrets({}, os.environ))}
        out.write(json.dumps(result) + "\n")
    return 0 if "answers" in result else FAILED


if __name__ == "__main__":
    sys.exit(main())
