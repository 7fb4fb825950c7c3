"""Loads the hardware table: the shipped one, overridden by what `bench` measured on this machine's GPUs, overridden by
the user's own ~/.config/ulysses/hardware.yaml. A calibration is used only on the machine with the GPUs it was measured
on.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulysses_cli.plan.hardware import Hardware

SHIPPED = Path(__file__).parent / "plan" / "hardware.yaml"
DRIVER = Path("/proc/driver/nvidia/gpus")
MAX_BYTES = 1 << 20
SMI_SECONDS = 10
HEADER = (
    "# Written by `ulysses bench --save-calibration`; used only on the machine that has these GPUs. May be deleted.\n"
)


def load_hardware() -> Hardware:
    """Raises RecipeError with every mistake of the user's files."""
    from ulysses_cli import hub
    from ulysses_cli.plan.hardware import read_hardware

    tables = [("the shipped hardware.yaml", _read_yaml(SHIPPED))]
    calibration = find_calibration()
    if calibration:
        tables.append((str(get_calibration_file()), calibration["rates"]))
    own = hub.get_user_folder() / "hardware.yaml"
    if own.exists():
        content = _read_yaml(own)
        tables.append((str(own), {} if content is None else content))
    return read_hardware(*tables)


def get_calibration_file() -> Path:
    from ulysses_cli import hub

    return hub.get_user_folder() / "calibration.yaml"


def find_calibration() -> dict[str, Any]:
    """{gpus, measured, rates} of this machine's GPUs; {} where they were not measured."""
    file = get_calibration_file()
    here = set(list_gpu_uuids()) if file.exists() else set()
    return next((entry for entry in _read_machines(file) if set(entry["gpus"]) == here), {}) if here else {}


def describe_calibration() -> list[str]:
    """A note for estimates that use measured rates; [] where the rates are the shipped ones."""
    entry = find_calibration()
    return [f"rates measured on this machine ({entry['measured']}): {get_calibration_file()}"] if entry else []


def save_calibration(rates: dict[str, Any], measured: str) -> Path:
    """Saves the rates of this machine's GPUs. Entries of other machines that share the home directory are kept."""
    import yaml

    file, here = get_calibration_file(), list_gpu_uuids()
    others = [entry for entry in _read_machines(file) if set(entry["gpus"]) != set(here)] if file.exists() else []
    machines = [*others, {"gpus": here, "measured": measured, "rates": rates}]
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(HEADER + yaml.safe_dump({"machines": machines}, sort_keys=False))
    part.replace(file)
    return file


def list_gpu_uuids() -> list[str]:
    """The UUIDs of all GPUs of this machine, also of those that CUDA_VISIBLE_DEVICES hides; [] without a driver."""
    uuids = []
    for file in sorted(DRIVER.glob("*/information")):
        line = re.search(r"^GPU UUID:\s*(\S+)", file.read_text(errors="replace"), re.MULTILINE)
        uuids += [line[1]] if line else []
    if uuids:
        return sorted(uuids)
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SMI_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return sorted(re.findall(r"UUID: (GPU-[\w-]+)", listing))


def _read_machines(file: Path) -> list[dict[str, Any]]:
    from ulysses_cli.plan.problem import Problem, RecipeError, Where

    content = _read_yaml(file)
    machines: Any = content.get("machines") if isinstance(content, dict) else None
    keys = {"gpus": list, "measured": str, "rates": dict}
    if isinstance(machines, list) and all(
        isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in keys.items())
        for entry in machines
    ):
        return machines
    raise RecipeError([Problem("machines", "is not a list of measured machines", f"delete {file}", Where(str(file)))])


def _read_yaml(file: Path) -> Any:
    import yaml

    from ulysses_cli.plan.problem import Problem, RecipeError, Where

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where libyaml is there
    try:
        with open(file, encoding="utf-8") as stream:
            return yaml.load(stream.read(MAX_BYTES), loader)
    except OSError as error:
        raise RecipeError([Problem("", f"cannot be read: {error.strerror}", "", Where(str(file)))]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = Where(str(file), mark.line + 1, mark.column + 1) if mark else Where(str(file))
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RecipeError([Problem("", f"not valid YAML: {reason}", "see the shipped hardware.yaml", where)]) from None
