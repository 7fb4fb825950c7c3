"""A stand-in of the Hugging Face hub on loopback: the parts of its HTTP interface that an upload uses, with faults."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

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

    def answer(self, content: Any = None, status: int = 200) -> None:
        body = json.dumps(content if content is not None else {}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        if (status := self.hub.find_fault(path)) is not None:
            self.answer({"error": "the stand-in fails as it was told"}, status)
        elif not path.startswith("/storage/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
        else:
            self.route(path, body)

    do_GET = do_POST = do_PUT = handle_request

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
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.repos[match[1]][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.repos[match[1]][value["path"]] = hub.objects[value["oid"]]
            self.answer({"commitUrl": f"{hub.address}/{match[1]}/commit/abc", "commitOid": "abc", "success": True})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            if match[1] not in hub.licences and match[1] not in hub.repos:
                self.answer({"error": "Repository not found"}, 404)
                return
            card = {"license": hub.licences[match[1]]} if match[1] in hub.licences else {}
            facts = {"cardData": card, "siblings": [], "tags": [], "private": match[1] in hub.private}
            self.answer({"id": match[1], "_id": "1", "sha": "abc", **facts})
        else:
            self.answer({"error": f"no such path: {path}"}, 404)


def hash_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OwnHandler", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
