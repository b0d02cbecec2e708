"""What a device holds after the calls of a session, written for plainness; and records of calls."""

from __future__ import annotations

import hashlib
from typing import Any

from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, BY_NAME
from rgpu.session.journal.record import Record
from rgpu.session.objects import graphs, module_table
from rgpu.session.objects.module_table import FunctionInfo, GlobalVariable, ModuleTable


def call(seq: int, name: str, payload: bytes = b"", **values: Any) -> Record:
    return Record(seq, BY_NAME[name].id, decoders.encode_args(name, **values), payload)


class NaiveDevice:
    """What a device holds after calls: written for plainness, sharing nothing with the code under test.

    Where a module's variable lands depends on every load and unload before it; an unload beside an open host function
    takes place when none is open.
    """

    def __init__(self) -> None:
        self.contexts: dict[int, dict[Any, Any]] = {}
        self.owned: dict[tuple[str, int], tuple[Any, Any]] = {}  # stream/event → (context or None, arguments)
        self.modules: dict[int, dict[str, Any]] = {}
        self.memory: dict[int, int] = {}
        self.maps: dict[int, tuple[int, int]] = {}
        self.aliases: dict[int, tuple[int, int]] = {}
        self.host: dict[int, Any] = {}
        self.history = hashlib.sha256()
        self.functions: set[int] = set()
        self.unloading: dict[int, tuple[int | None, bytes]] = {}  #: module → (context unless a library, contents)
        self.environment: Any = None

    def apply(self, record: Record) -> tuple[int, bytes] | None:
        name = BY_ID[record.call_id].name
        return getattr(self, name)(decoders.decode(record.call_id, record.args), record)

    def state(self) -> dict[str, Any]:
        contexts = {number: {key: value for key, value in held.items()} for number, held in self.contexts.items()}
        return {"contexts": contexts, "owned": self.owned, "modules": self.modules, "memory": self.memory,
                "maps": self.maps, "aliases": self.aliases, "host": self.host, "history": self.history.hexdigest(),
                "env": self.environment}

    def session_open(self, a: Any, r: Record) -> None:
        self.environment = self.environment or a

    def context_create(self, a: Any, r: Record) -> None:
        self.contexts.setdefault(a.context, {"made": a})

    def context_destroy(self, a: Any, r: Record) -> None:
        if self.contexts.pop(a.context, None) is None:
            return
        for number, (context, content) in list(self.unloading.items()):
            if context == a.context:
                del self.unloading[number]
                self.history.update(b"unload" + content)
        self.owned = {key: held for key, held in self.owned.items() if held[0] != a.context}
        for number in [n for n, m in self.modules.items() if m["context"] == a.context]:
            if self.modules[number]["library"]:
                self.modules[number]["context"] = None
            else:
                self._unload(number)
        if not self.contexts:
            self.memory.clear()

    def context_limit(self, a: Any, r: Record) -> None:
        if a.context in self.contexts:
            self.contexts[a.context]["limit", a.limit] = a.value

    def context_flags(self, a: Any, r: Record) -> None:
        if a.context in self.contexts:
            self.contexts[a.context]["flags"] = a.flags

    def memory_map(self, a: Any, r: Record) -> None:
        if a.address not in self.aliases:
            self.maps.setdefault(a.address, (a.size, a.device))

    def memory_unmap(self, a: Any, r: Record) -> None:
        if any(source == a.address for _, source in self.aliases.values()):
            return
        if self.maps.get(a.address, (None,))[0] == a.size:
            del self.maps[a.address]
            self.memory = {at: n for at, n in self.memory.items() if not a.address <= at < a.address + a.size}

    def memory_alias(self, a: Any, r: Record) -> None:
        if a.address not in self.maps and self.maps.get(a.source, (0,))[0] >= a.size:
            self.aliases.setdefault(a.address, (a.size, a.source))

    def memory_unalias(self, a: Any, r: Record) -> None:
        if self.aliases.get(a.address, (None,))[0] == a.size:
            del self.aliases[a.address]
            self.memory = {at: n for at, n in self.memory.items() if not a.address <= at < a.address + a.size}

    def memory_move(self, a: Any, r: Record) -> None:
        if a.to in self.maps or a.to in self.aliases or self.maps.get(a.address, (None,))[0] != a.size:
            return
        if any(a.address <= at < a.address + a.size for at in self.memory):
            return
        self.maps[a.to] = self.maps.pop(a.address)
        self.aliases = {at: (size, a.to if source == a.address else source)
                        for at, (size, source) in self.aliases.items()}

    def memory_allocate(self, a: Any, r: Record) -> None:
        self.memory.setdefault(a.address, a.size)

    def memory_free(self, a: Any, r: Record) -> None:
        self.memory.pop(a.address, None)

    memory_free_wait = memory_free

    def host_allocate(self, a: Any, r: Record) -> None:
        self.host.setdefault(a.address, a)

    def host_free(self, a: Any, r: Record) -> None:
        self.host.pop(a.address, None)

    def _context(self, number: int) -> int | None:
        return number if number in self.contexts else None

    def stream_create(self, a: Any, r: Record) -> None:
        self.owned.setdefault(("stream", a.stream), (self._context(a.context), a))

    def stream_destroy(self, a: Any, r: Record) -> None:
        self.owned.pop(("stream", a.stream), None)

    def event_create(self, a: Any, r: Record) -> None:
        self.owned.setdefault(("event", a.event), (self._context(a.context), a))

    def event_destroy(self, a: Any, r: Record) -> None:
        self.owned.pop(("event", a.event), None)

    def module_load(self, a: Any, r: Record) -> tuple[int, bytes]:
        if a.module in self.modules or bytes(r.payload) == b"bad":
            return 200, decoders.encode_reply("module_load", table=b"", log=b"no")
        self.history.update(b"load" + bytes(r.payload))
        place = int.from_bytes(self.history.digest()[:6], "little")
        table = ModuleTable((FunctionInfo("f", (), (0,) * 16),), (GlobalVariable("g", place, 8),))
        self.modules[a.module] = {"context": self._context(a.context), "library": a.library, "place": place,
                                  "content": bytes(r.payload)}
        return 0, decoders.encode_reply("module_load", table=module_table.encode(table), log=b"")

    def _unload(self, number: int) -> None:
        self.history.update(b"unload" + self.modules.pop(number)["content"])

    def module_unload(self, a: Any, r: Record) -> None:
        if a.module in self.modules and self.functions:
            gone = self.modules.pop(a.module)
            self.unloading[a.module] = None if gone["library"] else gone["context"], gone["content"]
        elif a.module in self.modules:
            self._unload(a.module)

    def host_function(self, a: Any, r: Record) -> None:
        self.functions.add(r.seq)

    def host_function_done(self, a: Any, r: Record) -> None:
        self.functions.discard(a.call)
        while self.unloading and not self.functions:
            self.history.update(b"unload" + self.unloading.pop(next(iter(self.unloading)))[1])

    def function_attribute(self, a: Any, r: Record) -> None:
        if a.module in self.modules:
            self.modules[a.module][a.function, a.attribute] = a.value

    def graph_instantiate(self, a: Any, r: Record) -> None:
        if a.context in self.contexts:
            self.owned.setdefault(("graph", a.exec), (a.context, graphs.decode(r.payload)))

    def graph_exec_update(self, a: Any, r: Record) -> None:
        if found := self.owned.get(("graph", a.exec)):
            context, nodes = found
            self.owned["graph", a.exec] = context, graphs.apply_changes(nodes, graphs.decode_changes(r.payload))

    def graph_exec_destroy(self, a: Any, r: Record) -> None:
        self.owned.pop(("graph", a.exec), None)

    def launch(self, a: Any, r: Record) -> None: ...

    def memset(self, a: Any, r: Record) -> None: ...
