"""What a canned pool answers, of names, numbers and texts that tables have trouble with."""

from __future__ import annotations

import time
from typing import Any

GIB = 1 << 30
BEGUN = 1_764_000_000.0
WAITS = ("fits nowhere: node-with-a-rather-long-name-001.cluster.example.org: cpu:0 has 0 MiB free of the 8192 MiB "
         "needed; node-b: cuda:0 has 4096 MiB free of the 8192 MiB needed; ") * 12
NAME = "training-of-the-large-language-model-number-0001"
SESSIONS = [
    {"session": NAME, "state": "running", "host": "node-with-a-rather-long-name-001.cluster.example.org", "epoch": 12,
     "memory_bytes": 63 * GIB, "gpu_share": 0.42, "compute_limit": 0.5, "calls": 1234567890, "awaited_calls": 98765,
     "pid": 4194303, "worker_pid": 3987654, "command": "/usr/bin/python3.11", "note": "", "user": "ada",
     "labels": {"team": "vision", "stage": "pre"}, "age_s": 7300.0},
    {"session": "größe-数据", "state": "moving", "host": "node-b", "epoch": 1, "memory_bytes": GIB // 2, "calls": 17,
     "awaited_calls": 3, "pid": 77, "worker_pid": 78, "command": "./heat", "user": "bob", "labels": {"team": "audio"},
     "note": "cannot move: cuIpcGetMemHandle", "age_s": 59.0}]
QUEUE = [{"session": "waits", "state": "queued", "host": None, "epoch": 0, "memory_bytes": None, "calls": None,
          "pid": 99, "worker_pid": None, "command": "./x", "note": "position 1: " + WAITS, "labels": {}, "age_s": 4.0}]
ENDED = [{"session": "done", "state": "ended", "host": None, "epoch": 3, "exit_code": 137, "ended": BEGUN,
          "lasted_s": 12345.0, "memory_bytes": None, "note": "killed by its user", "age_s": 1.0, "labels": {}}]
NODES = [
    {"host": "node-with-a-rather-long-name-001.cluster.example.org", "state": "ready",
     "address": "tcp://[2001:db8:85a3::8a2e:370:7334]:50123", "data": "[2001:db8:85a3::8a2e:370:7334]:50124",
     "leader": True, "answers": True, "pid": 4194303, "version": "0.1.0", "reason": "", "devices": [
         {"device": f"cuda:{i}", "name": "NVIDIA H200", "total_memory": 141 * GIB, "free_memory": 100 * GIB - i,
          "healthy": i != 1, "reason": "Xid 79", "sessions": i, "utilization": 0.97, "memory_used": 41 * GIB}
         for i in range(2)]},
    {"host": "b", "state": "draining", "address": "tcp://10.0.0.2:5001", "data": "10.0.0.2:5002", "leader": False,
     "answers": True, "pid": 12, "version": "0.1.0", "reason": "new cable", "devices": []}]
LOST = [{"host": "c", "state": "lost", "lost_since": BEGUN, "address": "", "data": "", "leader": False,
         "answers": False, "pid": None, "version": "", "reason": "", "devices": []}]
EVENTS = [{"revision": 4, "kind": "move", "when": BEGUN, "session": NAME, "host": None, "decision": "begin_move",
           "reason": WAITS[:150].strip(), "epoch": 12, "owner": "node-b", "leader": 3},
          {"revision": 9, "kind": "node", "when": BEGUN + 90000, "session": None, "host": "node-b", "decision": "lose",
           "reason": "the lease of node-b has ended", "epoch": None, "owner": None, "leader": 3}]
HOST = NODES[0]["host"]
CHECKPOINTS = [
    {"image": f"{NAME}-e12-p1234567890-1a214cba56b", "named": True, "session": NAME, "position": 1234567890,
     "epoch": 12, "memory": 63 * GIB, "stored": 41 * GIB, "created": time.time() - 3 * 86400 - 60, "pages": 1 << 20,
     "user": "ada", "error": ""},
    {"image": "größe-数据-e1-p17-0", "named": False, "session": "größe-数据", "position": 17, "epoch": 1,
     "memory": GIB // 2, "stored": 4096, "created": time.time() - 7300, "pages": 8, "user": "bob",
     "error": "manifest: byte 4096: the checksum is wrong; `rgpu image rm` deletes it"}]
KEYS = [{"name": "ada", "role": "operator", "user": "ada", "public": "a" * 40},
        {"name": f"node-{HOST}"[:63], "role": "node", "user": "", "public": "N" * 40},
        {"name": "laptop-of-bob", "role": "user", "user": "bob", "public": "b" * 40}]
QUOTAS = {"default": {"sessions": 8, "memory": None, "gpus": 2.0, "queued": None, "checkpoints": None}, "quotas": [
    {"user": "ada", "use": {"sessions": 3, "memory": 63 * GIB, "gpus": 1.5, "queued": 0, "checkpoints": 5 * GIB},
     "limits": {"sessions": 8, "memory": 640 * GIB, "gpus": 2.0, "queued": None, "checkpoints": 20 * GIB},
     "own": {"memory": 640 * GIB}, "over": []},
    {"user": "größe-数据-of-a-department",
     "use": {"sessions": 9, "memory": GIB, "gpus": 0.25, "queued": 3, "checkpoints": None},
     "limits": {"sessions": 8, "memory": None, "gpus": 2.0, "queued": None, "checkpoints": GIB}, "own": {},
     "over": []}]}
ADOPTED: dict[str, Any] = {
    "went_back": "its revision is 12, and 345 was seen", "keys": ["laptop-of-bob"], "problems": [], "done": False,
    "away": [], "steps": [
        {"session": NAME, "action": "own", "host": HOST, "before": 11, "epoch": 12, "stale": [],
         "reason": "node-b holds it, and the registry is behind: written as it is, at a new epoch"},
        {"session": "größe-数据", "action": "recover", "host": None, "before": None, "epoch": 2, "stale": ["node-b"],
         "reason": "no node holds it any more"},
        {"session": "done", "action": "keep", "host": None, "before": 3, "epoch": 3, "stale": [], "reason": "ended"}]}
STARTED = {"pool": "/srv/rgpu/pool", "nodes": [
    {"host": HOST, "control": "tcp://[2001:db8:85a3::8a2e:370:7334]:50123",
     "data": "[2001:db8:85a3::8a2e:370:7334]:50124", "pid": 4194303},
    {"host": "b", "control": "tcp://10.0.0.2:5001", "data": "10.0.0.2:5002", "pid": 12}]}
REPLAYED = {"session": NAME, "device": "cpu", "position": 1234567890, "seconds": 12.345, "answers": 98765,
            "answers_compared": 98765, "answers_digest": "0f" * 16, "error": "", "snapshots": [
                {"position": 17, "pages": 8, "objects": 3, "digest": "ab" * 32},
                {"position": 1234567890, "pages": 1048576, "objects": 4321, "digest": "cd" * 32}]}
SIMULATED = [{"policy": policy, "rebalance": policy == "fgd", "load": 1.3, "mean": {
    "allocated_share": 0.9417, "fragmented_gpus": 123.4, "refused": 2345.6, "moves": 17.0, "waiting_s": 1234.5,
    "decision_us": 317.2, "decision_p99_us": 2345.6}} for policy in ("best-fit", "fgd")]
PICTURE = {"status": {"sessions": {"running": 1, "moving": 1}, "moves": {}, "queue": [], "leader": "b",
                      "paused": False}, "nodes": NODES + LOST, "sessions": SESSIONS}
