"""Take over the operations that earlier versions kept as JSON files in the store, and had not ended."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from roller_svc.errors import StoreError
from roller_svc.farm.operations import OperationState, is_id
from roller_svc.farm.queue import OperationQueue

FOLDER, IMPORTED = "operations", "operations-imported"

log = logging.getLogger(__name__)


def import_records(root: Path, queue: OperationQueue) -> int:
    """Queue the unfinished operations in a store's folder of records, and rename the folder; return their number.

    Results are in the store under their actions, so records that are done are left behind.
    """
    folder = root / FOLDER
    if not folder.is_dir():
        return 0
    count = 0
    for path in sorted(folder.glob("*.json")):
        request = _unfinished_request(path)
        if request is not None:
            count += queue.insert_foreign(path.stem, request)
    try:
        folder.rename(root / IMPORTED)
    except OSError as failure:
        raise StoreError(f"cannot rename {FOLDER} in the store: {failure.strerror}") from failure
    log.info("%d unfinished operations of an earlier version are queued", count)
    return count


def _unfinished_request(path: Path) -> dict[str, object] | None:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        log.warning("the record %s cannot be read: it is left in %s", path.name, IMPORTED)
        return None
    is_unfinished = isinstance(record, dict) and record.get("stage") != OperationState.DONE.value
    request = record.get("request") if is_unfinished and is_id(path.stem) else None
    return request if isinstance(request, dict) else None
