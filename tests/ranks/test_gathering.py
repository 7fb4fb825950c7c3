"""Compares the ledger's replay of what ZeRO-3 gathers with DeepSpeed's own hooks in a traced step, hook by hook."""

import json
import subprocess
import sys
from typing import Any

import pytest
from support.paths import ROOT
from support.real_steps import ZERO, make_case, make_request

from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.ledger.zero.coordinator import Coordinator, ModuleOrder
from ulysses_cli.plan.ledger.zero.gathering import find_leaves, join_mlps
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import read_model_shape

LOG = ROOT / "tests" / "support" / "hook_log.py"
NARROW = (f"{ZERO}.max_reuse_distance=700000", f"{ZERO}.max_live_parameters=1500000", "data.max_length=256")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 64}
SHARED = {
    "model_type": "zamba2", "n_mamba_heads": 16, "mamba_ngroups": 2, "mamba_d_state": 16, "chunk_size": 64,
    "num_key_value_heads": 8, "head_dim": 64, "adapter_rank": 16, "num_mem_blocks": 2, "use_mem_rope": True,
    "use_shared_attention_adapter": True, "tie_word_embeddings": True,
}  # fmt: skip
LAYERS = ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"]
FEWER = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_mem_blocks": 1}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "adapters": ({"num_hidden_layers": 3}, ("lora.r=16",)),
    "full": ({"num_hidden_layers": 6}, ()),
    "no recomputation": ({"num_hidden_layers": 6}, ("memory.gradient_checkpointing=false",)),
    "tied, tiles": ({"num_hidden_layers": 6, "tie_word_embeddings": True}, ("memory.tiled_mlp=true",)),
    "adapters, tiles": ({"num_hidden_layers": 4}, ("lora.r=16", "memory.tiled_mlp=true")),
    "norms behind": ({"model_type": "olmo2", "num_hidden_layers": 5}, ()),
    "four norms": ({"model_type": "gemma2", "num_hidden_layers": 4}, ()),
    "experts": ({"model_type": "qwen3_moe", "num_hidden_layers": 5, **EXPERTS}, ()),
    "scans": ({"model_type": "bamba", "num_hidden_layers": 5, "attn_layer_indices": [2], **MAMBA}, ()),
    "shared blocks": ({**SHARED, "num_hidden_layers": 6, "layers_block_type": LAYERS}, ()),
    "shared blocks, tiles": ({**SHARED, **FEWER}, ("memory.tiled_mlp=true",)),
    "shared blocks, adapters": ({**SHARED, **FEWER}, ("lora.r=16",)),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name == "adapters" else pytest.mark.full) for name in CASES]
)
def test_the_replay_holds_what_deepspeed_holds(case: str) -> None:
    config, overrides = CASES[case]
    recipe = make_case(config, "parallel.sp_size=2", *NARROW, *overrides)
    request = make_request(recipe)
    done = subprocess.run([sys.executable, LOG], input=json.dumps(request), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    real = [(enters, is_forward, num_bytes // 4) for enters, is_forward, num_bytes in json.loads(done.stdout)]
    job = make_job(recipe, read_model_shape(recipe.model.config, "test"), Levers(**request["levers"]))
    leaves = find_leaves(job.shape, tiles_mlp=job.levers.tiled_mlp)
    modules = tuple(join_mlps(job.weights.modules, leaves, job.shape))
    recomputes = job.levers.gradient_checkpointing is not False
    visits = list(ModuleOrder(modules).walk_step(recomputes=recomputes))
    coordinator = Coordinator(modules, visits, job.engine, joins_mlps=bool(leaves))
    results = []
    for visit in visits:
        coordinator.follow(visit)
        results.append((visit.enters, not visit.is_backward, coordinator.held))
    num_same = len(visits) - 40  # the end of the first layer's backward differs where an input needs no gradient
    assert [each[:2] for each in results[:num_same]] == [each[:2] for each in real[:num_same]]
    differences = [abs(a[2] - b[2]) for a, b in zip(results[:num_same], real[:num_same], strict=True)]
    assert max(differences) <= 1024, differences.index(max(differences))  # small weights are not all rounded alike
