"""Does in the server of ranks, once, what each of its forks would do again: late imports, tables that libraries make at
their first use. Each fork saves a second of work.

The last of the preloaded modules: what is alive when it ends is not searched by any collection of garbage. DeepSpeed
collects by hand for each engine, which would take half a second with all of torch and transformers alive.
"""

import gc

import deepspeed.ops
import deepspeed.runtime.superoffload.superoffload_stage3
import deepspeed.runtime.zero.muon.muon_optimizer
import hypothesis  # noqa: F401 - files of tests, which ranks import
import pytest  # noqa: F401
import typer.main
from deepspeed.utils import nvtx
from torch._dynamo import trace_rules
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import ulysses_cli.cli
import ulysses_cli.hardware_table
import ulysses_cli.train.processes.rendezvous
from support.shortcuts import take_shortcuts

nvtx.enable_nvtx = False  # a profiler's marks around each small function, which a CPU has no use for
deepspeed.ops.__compatible_ops__  # noqa: B018 - tries the compiler
trace_rules.get_torch_obj_rule_map()
get_checkpoint_conversion_mapping("qwen3")
take_shortcuts()
typer.main.get_command(ulysses_cli.cli.app)
gc.enable()
gc.collect()
gc.freeze()
