"""The numbers of a page stream's messages; :mod:`.page_stream` has the table."""

from __future__ import annotations

BEGIN, LAYOUT, PAGES, ROUND, STATE, LANE = 32, 33, 34, 35, 36, 37
ACK, DONE, FAILED, READY, CREDIT = 40, 41, 42, 43, 44
OBJECTS, MADE = 60, 61
