"""Access to etcd's messages and methods, from the package ``etcd3``.

``etcd3`` 0.12.0 is of 2020: the modules that protoc generated for it build
descriptors in a way that protobuf refuses since version 4 ("Descriptors cannot
be created directly"), so ``import etcd3`` fails beside today's PyTorch. The
serialized descriptors inside are good. This module reads those bytes (it
parses the files and runs nothing of them) and builds messages in a descriptor
pool of its own: nothing global changes, and no other package's etcd messages
can collide with these.

Nothing else of the package is used: its watcher spins while the server is down
and never resumes, its reads take no revision and no limit, and it supports one
endpoint. The stubs need one line for each method, so they are made here, for the
blocking and the asyncio channels of gRPC.

Fields that etcd 3.4 added after the package was made are added here
(etcd-io/etcd, api/etcdserverpb/rpc.proto): ``WatchProgressRequest``, with which
a watch asks for a sign of life, and ``fragment``, without which one large batch
of changes can exceed what a channel receives.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

from rgpu.session.errors import UsageError

#: The .proto files, in the order of their imports.
_FILES = ("kv", "auth", "rpc")


class Rpc:
    """Messages by name (``rpc.RangeRequest``), and :meth:`method` for a channel's callables."""

    def __init__(self, folder: Path) -> None:
        from google.protobuf import descriptor_pb2, descriptor_pool

        self._pool = descriptor_pool.DescriptorPool()
        self._methods: dict[str, tuple[str, Any, Any, bool]] = {}
        for name in _FILES:
            proto = descriptor_pb2.FileDescriptorProto.FromString(_serialized(folder / f"{name}_pb2.py"))
            # gogoproto and the gateway's annotations are options for Go and for a proxy; their files are missing.
            kept = [dependency for dependency in proto.dependency if dependency in {f"{n}.proto" for n in _FILES}]
            del proto.dependency[:]
            proto.dependency.extend(kept)
            if name == "rpc":
                _add_fields_of_3_4(proto)
            self._pool.AddSerializedFile(proto.SerializeToString())
            self._take(proto)

    def _take(self, proto: Any) -> None:
        from google.protobuf import message_factory

        for message in proto.message_type:
            found = self._pool.FindMessageTypeByName(f"{proto.package}.{message.name}")
            setattr(self, message.name, message_factory.GetMessageClass(found))
        for service in proto.service:
            for method in service.method:
                request, response = (getattr(self, kind.rsplit(".", 1)[1])
                                     for kind in (method.input_type, method.output_type))
                path = f"/{proto.package}.{service.name}/{method.name}"
                self._methods[f"{service.name}.{method.name}"] = (path, request, response, method.client_streaming)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"etcd's protocol has no message {name}")

    def method(self, channel: Any, name: str) -> Any:
        """Return the callable of a method such as ``"KV.Range"`` on a channel (blocking or asyncio)."""
        path, request, response, streaming = self._methods[name]
        make = channel.stream_stream if streaming else channel.unary_unary
        return make(path, request_serializer=request.SerializeToString, response_deserializer=response.FromString)


@lru_cache(maxsize=1)
def load() -> Rpc:
    """Load the messages. Raises :class:`UsageError` when ``etcd3`` is not installed, or has other contents."""
    found = importlib.util.find_spec("etcd3")  # find_spec executes nothing of the package
    if found is None or not found.submodule_search_locations:
        raise UsageError("a registry in etcd needs the Python package etcd3: pip install 'etcd3==0.12.0'")
    folder = Path(next(iter(found.submodule_search_locations))) / "etcdrpc"
    try:
        return Rpc(folder)
    except (ImportError, OSError, SyntaxError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"the package etcd3 in {folder.parent} cannot be used: {error}; version 0.12.0 is known to "
                         "work") from error


def _serialized(path: Path) -> bytes:
    """Return the bytes that follow ``serialized_pb=`` in a generated module."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.keyword) or node.arg != "serialized_pb":
            continue
        value: ast.expr = node.value
        if isinstance(value, ast.Call) and value.args:  # _b('...'): text whose characters are the bytes
            value = value.args[0]
        if isinstance(value, ast.Constant) and isinstance(value.value, bytes | str):
            return value.value if isinstance(value.value, bytes) else value.value.encode("latin-1")
    raise ValueError(f"{path} holds no serialized descriptor")


def _add_fields_of_3_4(proto: Any) -> None:
    messages = {message.name: message for message in proto.message_type}
    if "WatchProgressRequest" in messages:
        return
    proto.message_type.add(name="WatchProgressRequest")
    boolean, message, optional = 8, 11, 1  # FieldDescriptorProto.Type and .Label
    messages["WatchRequest"].field.add(name="progress_request", number=3, type=message, label=optional, oneof_index=0,
                                       type_name=f".{proto.package}.WatchProgressRequest")
    for name, number in (("WatchCreateRequest", 8), ("WatchResponse", 7)):
        messages[name].field.add(name="fragment", number=number, type=boolean, label=optional)
