"""Logs every ZeRO-3 hook of a traced step: reads the step's request as JSON on stdin, writes the hooks of the counted
step to stdout.

It runs as a process of its own, like the trace, since it patches DeepSpeed.
"""

import json
import os
import sys
from typing import Any

from ulysses_cli.prove.trace import trace


class HookLog:
    """Collects (enters, is forward, bytes gathered and not released) at each hook; at the end it holds the last
    step's."""

    def __init__(self) -> None:
        self.hooks: list[tuple[bool, bool, int]] = []
        self.num_bytes = 0
        self.is_fetching = False
        self.born: set[int] = set()

    def note(self, event: Any) -> None:
        if event.is_host:
            return
        if event.num_bytes > 0 and self.is_fetching:
            self.born.add(event.storage)
            self.num_bytes += event.num_bytes
        elif event.num_bytes < 0 and event.storage in self.born:
            self.num_bytes += event.num_bytes

    def watch(self, coordinator: Any, storages: Any) -> None:
        fetch, release, reset = coordinator.fetch_sub_module, coordinator.release_sub_module, coordinator.reset_step
        count = storages._note

        def fetch_and_note(itself: Any, module: Any, forward: bool) -> None:
            self.is_fetching = True
            fetch(itself, module, forward)
            self.is_fetching = False
            self.hooks.append((True, forward, self.num_bytes))

        def release_and_note(itself: Any, module: Any, forward: bool = False) -> None:
            release(itself, module, forward)
            self.hooks.append((False, forward, self.num_bytes))

        def reset_and_forget(itself: Any) -> None:
            reset(itself)
            self.hooks.clear()

        def count_and_note(itself: Any, event: Any) -> None:
            self.note(event)
            count(itself, event)

        coordinator.fetch_sub_module, coordinator.release_sub_module = fetch_and_note, release_and_note
        coordinator.reset_step, storages._note = reset_and_forget, count_and_note


def main() -> None:
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    trace.prepare_process(request)
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    from ulysses_cli.prove.trace.storages import Storages

    log = HookLog()
    log.watch(PartitionedParameterCoordinator, Storages)
    num_offloaded = int(request["levers"]["offloaded_layers"])
    trace.trace_layers(request, (num_offloaded, int(request["config"]["num_hidden_layers"]) - num_offloaded))
    out.write(json.dumps(log.hooks))
    out.close()


if __name__ == "__main__":
    main()
