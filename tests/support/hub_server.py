"""A stand-in of the Hugging Face hub on loopback: the parts of its HTTP interface that uploads, listings and downloads
use, with faults. Like the hub, it refuses a commit while another one goes on, and the deletion of a file that is not
there."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.constants
import huggingface_hub.utils._http
import pytest

from ulysses_cli.commands.children import publishing

SHA = "0123456789abcdef0123456789abcdef01234567"  # the one commit of every data set
TOKEN = "hf_aTokenForTheStandInOfTheHub123"


@dataclass
class Hub:
    """What the hub holds, and what it saw. `faults`: how often a path that matches fails, and with which status."""

    address: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    faults: list[list[Any]] = field(default_factory=list)  # [pattern, times left, status]
    requests: list[str] = field(default_factory=list)
    licences: dict[str, str] = field(default_factory=dict)
    committing: threading.Lock = field(default_factory=threading.Lock)
    data_sets: dict[str, dict[str, bytes]] = field(default_factory=dict)  # files by name
    watch: Callable[[str], None] = lambda moment: None  # gets `asked` and `decided` of each request

    def find_fault(self, path: str) -> int | None:
        for fault in self.faults:
            if fault[1] > 0 and re.search(fault[0], path):
                fault[1] -= 1
                return int(fault[2])
        return None


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any = None, status: int = 200, code: str = "") -> None:
        """`code`: of an error, by which clients know it."""
        body = json.dumps(content if content is not None else {}).encode()
        self.hub.watch("decided")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", str(content["error"]))
        self.end_headers()
        self.wfile.write(body)

    def answer_missing(self, what: str) -> None:
        self.answer({"error": what}, 404, "EntryNotFound")

    def answer_bytes(self, content: bytes) -> None:
        """The whole content, or the range that was asked for."""
        wanted, status = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""), 200
        num_bytes = len(content)
        if wanted:
            first, last = int(wanted[1]), int(wanted[2] or num_bytes - 1)
            content, status = content[first : last + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hash_blob(content)}"')
        self.send_header("X-Repo-Commit", SHA)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{num_bytes}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.watch("asked")
        if (status := self.hub.find_fault(path)) is not None:
            self.answer({"error": "the stand-in fails as it was told"}, status)
        elif not path.startswith("/storage/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
        else:
            self.route(path, body)

    do_GET = do_POST = do_PUT = do_HEAD = handle_request

    def route(self, path: str, body: bytes) -> None:
        hub = self.hub
        if path == "/api/whoami-v2":
            self.answer({"type": "user", "name": "me", "fullname": "me", "orgs": [], "auth": {}})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            is_new = name not in hub.repos
            hub.repos.setdefault(name, {})
            hub.private |= (
                {name}
                if is_new and "private" in (asked.get("visibility"), asked.get("private") and "private")
                else set()
            )
            self.answer({"url": f"{hub.address}/{name}", "error": "exists"}, 200 if is_new else 409)
        elif match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            repo = hub.repos[match[1]]
            files = [
                {"path": name, "uploadMode": "lfs" if name.endswith(".safetensors") else "regular",
                 "shouldIgnore": False, "oid": hash_blob(repo[name]) if name in repo else None}
                for name in (file["path"] for file in json.loads(body)["files"])
            ]  # fmt: skip
            self.answer({"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = []
            for item in json.loads(body)["objects"]:
                upload = {"upload": {"href": f"{hub.address}/storage/{item['oid']}", "header": {}}}
                objects.append(item if item["oid"] in hub.objects else {**item, "actions": upload})
            self.answer({"transfer": "basic", "objects": objects})
        elif match := re.fullmatch(r"/storage/(\w+)", path):
            assert hashlib.sha256(body).hexdigest() == match[1]
            hub.objects[match[1]] = body
            self.answer()
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            if not hub.committing.acquire(blocking=False):
                self.answer({"error": "A commit has happened since. Please refresh and try again."}, 412)
                return
            try:
                missing = commit(hub, hub.repos[match[1]], list(map(json.loads, body.splitlines())))
            finally:
                hub.committing.release()
            if missing:
                self.answer_missing(f"A file with this name doesn't exist: {missing}")
                return
            self.answer({"commitUrl": f"{hub.address}/{match[1]}/commit/abc", "commitOid": "abc", "success": True})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/main(?:/(.*))?", path):
            is_deep = parse_qs(urlsplit(self.path).query).get("recursive") == ["true"]
            entries = list_entries(hub.repos[match[1]], unquote(match[2] or ""), is_deep)
            self.answer(entries) if entries or not match[2] else self.answer_missing("no such folder")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/paths-info/main", path):
            entries = list_entries(hub.repos[match[1]], "", is_deep=True)
            self.answer([entry for entry in entries if entry["path"] in parse_qs(body.decode())["paths"]])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/main/(.+)", path):
            content = hub.repos[match[1]].get(unquote(match[2]))
            self.answer_bytes(content) if content is not None else self.answer_missing("no such file")
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/revision/(.+)", path):
            if match[1] not in hub.data_sets:
                self.answer({"error": "Repository not found"}, 404, "RepoNotFound")
            elif match[2] not in ("main", SHA):
                self.answer({"error": "Revision not found"}, 404, "RevisionNotFound")
            else:
                self.answer({"id": match[1], "_id": "1", "sha": SHA, "private": False, "tags": [], "siblings": []})
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/.+", path):
            files = hub.data_sets[match[1]].items()
            self.answer(
                [{"type": "file", "path": name, "size": len(body), "oid": hash_blob(body)} for name, body in files]
            )
        elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self.answer_bytes(hub.data_sets[match[1]][match[2]])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            if match[1] not in hub.licences and match[1] not in hub.repos:
                self.answer({"error": "Repository not found"}, 404)
                return
            card = {"license": hub.licences[match[1]]} if match[1] in hub.licences else {}
            facts = {"cardData": card, "siblings": [], "tags": [], "private": match[1] in hub.private}
            self.answer({"id": match[1], "_id": "1", "sha": "abc", **facts})
        else:
            self.answer({"error": f"no such path: {path}"}, 404)


def commit(hub: Hub, files: dict[str, bytes], lines: list[dict[str, Any]]) -> str:
    """Changes the files of a repository. Returns the name of a file that should be deleted and is not there."""
    for line in lines:
        name = line["value"].get("path", "")
        if line["key"] == "deletedFile" and name not in files:
            return name
    for line in lines:
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            files[value["path"]] = hub.objects[value["oid"]]
        elif line["key"] == "deletedFile":
            del files[value["path"]]
    return ""


def list_entries(files: dict[str, bytes], folder: str, is_deep: bool) -> list[dict[str, Any]]:
    """What the hub says of the files and folders below a folder."""
    inside = f"{folder.rstrip('/')}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        if not name.startswith(inside):
            continue
        parts = name.removeprefix(inside).split("/")
        for depth in range(1, len(parts)):
            path = inside + "/".join(parts[:depth])
            if is_deep or depth == 1:
                entries[path] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": path}
        if is_deep or len(parts) == 1:
            entries[name] = {"type": "file", "oid": hash_blob(content), "size": len(content), "path": name}
    return list(entries.values())


def hash_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OwnHandler", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def use_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Publishing of this process speaks to the stand-in, and waits nowhere."""
    monkeypatch.setattr(publishing, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(publishing.HubModels.__init__, "__defaults__", ((0.0, 0.0),))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)  # as in a user's process
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub
