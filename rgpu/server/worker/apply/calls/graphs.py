"""Executable graphs."""

from __future__ import annotations

from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.server.worker.apply.calls.answering import CUDA_ERROR_INVALID_VALUE, Answers, read
from rgpu.session.errors import Corrupt, DeviceError
from rgpu.session.journal.record import Record
from rgpu.session.objects import graphs


class GraphCalls:
    """Calls about executable graphs."""

    def __init__(self, device: Device, answers: Answers) -> None:
        self._device, self._answers = device, answers

    def graph_instantiate(self, record: Record, args: Any) -> None:
        """Make an executable graph of its nodes."""
        self._device.instantiate_graph(args.exec, args.context, args.flags, read(graphs.decode, record.payload, record))

    def graph_exec_update(self, record: Record, args: Any) -> None:
        """Replace nodes of an executable graph."""
        changes = read(graphs.decode_changes, record.payload, record)
        try:
            self._device.update_graph(args.exec, changes)
        except Corrupt as error:  # changes that do not fit the nodes
            raise DeviceError(error.message, CUDA_ERROR_INVALID_VALUE) from error

    def graph_launch(self, record: Record, args: Any) -> None:
        """Launch an executable graph."""
        self._device.launch_graph(record.seq, args.exec, args.stream)

    def graph_exec_destroy(self, record: Record, args: Any) -> None:
        """Destroy an executable graph."""
        self._device.destroy_graph(args.exec)
