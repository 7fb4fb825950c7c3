"""Addresses of remote disks: which schemes are known, which package each needs, what is wrong with an address. Nothing
is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """`package` opens addresses of this kind, and `extra` of this tool installs it; '' where nothing is needed.
    `writes_in_turn`: each write is a commit, and one that meets another is refused."""

    package: str
    extra: str
    credentials: str  # where that package reads them
    writes_in_turn: bool = False


SCHEMES = {
    "s3": Scheme(
        "s3fs", "s3", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL elsewhere"
    ),
    "gs": Scheme("gcsfs", "gs", "GOOGLE_APPLICATION_CREDENTIALS"),
    "hf": Scheme("huggingface_hub", "", "HF_TOKEN", writes_in_turn=True),
    "file": Scheme("fsspec", "", ""),
}
EXAMPLES = "s3://bucket/folder, gs://bucket/folder, hf://owner/model/folder or file:///folder"


CACHE = "~/.cache/ulysses"  # what recipes name by an address is downloaded below it, once


def get_scheme(address: str) -> str:
    return address.partition("://")[0] if "://" in address else ""


def find_address_problem(address: str) -> tuple[str, str]:
    """Returns what is wrong with an address and what to write instead, or two empty texts."""
    name = get_scheme(address)
    if name not in SCHEMES:
        what = "is of a kind that is not supported" if name else "has no scheme, such as s3://"
        return what, f"write {EXAMPLES}; s3 and gs need pip install ulysses-cli[s3] or ulysses-cli[gs]"
    rest = address.removeprefix(f"{name}://")
    host, _, path = rest.partition("/")
    if set("?#") & set(rest) or (name != "hf" and "@" in host):
        needs = f"it is read from the environment: {SCHEMES[name].credentials}" if SCHEMES[name].credentials else ""
        return "holds a key or other options, which recipes must not", needs or f"write {EXAMPLES}"
    if name == "file":
        if host or not path.strip("/"):
            return "does not name a folder from the root on", "write file:///folder, with three slashes"
    elif not host:
        return "does not name a bucket", f"write {EXAMPLES}"
    if ".." in path.split("/"):
        return "leads out of its folder with ..", "write the folder itself"
    return "", ""


def name_local_copy(address: str) -> str:
    """The path of the copy that is made of a model or of data. What is not the address of one stays as it is."""
    if "://" not in address or find_address_problem(address)[0] or set("*[]") & set(address):
        return address
    scheme, rest = get_scheme(address), address.partition("://")[2].rstrip("/")
    return rest if scheme == "file" else f"{CACHE}/{scheme}/{rest}"


def find_address(path: str | None) -> str:
    """The address of which `path` is the copy, or ''."""
    scheme, _, rest = (path or "").removeprefix(f"{CACHE}/").partition("/")
    return f"{scheme}://{rest}" if path and path.startswith(f"{CACHE}/") and scheme in SCHEMES else ""
