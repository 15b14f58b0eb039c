"""Products of one to eight rows on a GPU: the matrix streams through a ring of pages in shared memory."""

from __future__ import annotations

from roller_svc.families.family import Family
from roller_svc.families.gpu.streamed_rows.cost import streamed_rows_cost
from roller_svc.families.gpu.streamed_rows.rules import StreamedRowsRules
from roller_svc.families.gpu.streamed_rows.workload import prepare

STREAMED_ROWS = Family(
    name="gpu/streamed_rows",
    prepare=prepare,
    rules=StreamedRowsRules,
    cost=streamed_rows_cost,
    can_split=False,
)
