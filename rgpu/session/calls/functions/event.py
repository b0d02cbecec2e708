"""Driver functions: events."""

from __future__ import annotations

from rgpu.session.calls.functions.model import ASYNC, SYNC, function

FUNCTIONS = (
    function("cuEventCreate", "CUevent *phEvent, unsigned int Flags", "cuEventCreate 2000", ASYNC, "event_create"),
    function("cuEventDestroy", "CUevent hEvent", "cuEventDestroy 2000", alias="cuEventDestroy_v2"),
    function("cuEventDestroy_v2", "CUevent hEvent", "cuEventDestroy 4000", ASYNC, "event_destroy event_unimport"),
    function(
        "cuEventElapsedTime", "float *pMilliseconds, CUevent hStart, CUevent hEnd", "cuEventElapsedTime 2000", SYNC,
        "event_elapsed", "volatile",
    ),
    function(
        "cuEventElapsedTime_v2", "float *pMilliseconds, CUevent hStart, CUevent hEnd", "cuEventElapsedTime 12080",
        SYNC, "event_elapsed", "volatile",
    ),
    function("cuEventQuery", "CUevent hEvent", "cuEventQuery 2000", SYNC,
             "completed imported_event_query", "from the watermark; another process's event is asked for"),
    function(
        "cuEventRecord", "CUevent hEvent, CUstream hStream", "cuEventRecord 2000 ptsz 7000", SYNC,
        "event_record event_mark applied", "awaited where the event was given to other processes",
    ),
    function(
        "cuEventRecordWithFlags", "CUevent hEvent, CUstream hStream, unsigned int flags",
        "cuEventRecordWithFlags 11010 ptsz 11010", ASYNC, "event_record",
    ),
    function("cuEventSynchronize", "CUevent hEvent", "cuEventSynchronize 2000", SYNC,
             "event_synchronize imported_event_synchronize completed"),
)
