"""Copies of weights inside a replica (DeepSpeed's hpZ), without a wait of the host for each.

A weight's copy is made on the stream that computes and gathered from on another. DeepSpeed lets the host wait for the
device after each copy, once per weight and step: 291 times for an 8B model. Here the gathering stream waits, on the
device and for the copies that it gathers. Wraps methods of DeepSpeed's parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from typing import Any


class OrderedCopies:
    """One rank's. `parameters`: of ZeRO-3. Nothing changes on a device that runs everything in order."""

    def __init__(self, parameters: Iterable[Any], accelerator: Any) -> None:
        self.accelerator = accelerator
        self.events: dict[Any, Any] = {}  # of each weight's last copy
        if accelerator.resolves_data_dependency():
            return
        # DeepSpeed asks this before it waits. Other threads, which fetch weights, get the device's own answer.
        self.copying = threading.local()
        self.own_answer, accelerator.resolves_data_dependency = accelerator.resolves_data_dependency, self.is_ordered
        for parameter in parameters:
            parameter.partition = partial(self.partition, parameter, parameter.partition)
            parameter.all_gather_coalesced = partial(self.gather, parameter.all_gather_coalesced)

    def is_ordered(self) -> bool:
        return getattr(self.copying, "is_ordered", False) or bool(self.own_answer())

    def partition(self, parameter: Any, own: Any, param_list: Any = None, **options: Any) -> None:
        """In place of a parameter's `partition`, which makes the copies that are missing."""
        released = [parameter] if param_list is None else list(param_list)
        before = [each.ds_secondary_tensor for each in released]
        self.copying.is_ordered = True
        try:
            own(param_list=released, **options)
        finally:
            self.copying.is_ordered = False
        made = [
            each
            for each, copy in zip(released, before, strict=True)
            if options.get("has_been_updated") or each.ds_secondary_tensor is not copy
        ]
        if made:
            event = self.accelerator.Event()
            event.record(self.accelerator.current_stream())
            self.events.update(dict.fromkeys(made, event))

    def gather(self, own: Any, params: Iterable[Any], **options: Any) -> Any:
        """In place of `all_gather_coalesced`, which DeepSpeed calls on the stream that gathers."""
        gathered = list(params)
        stream = self.accelerator.current_stream()
        for event in {self.events[each] for each in gathered if each in self.events}:
            stream.wait_event(event)
        return own(gathered, **options)
