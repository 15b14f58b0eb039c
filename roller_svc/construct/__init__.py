"""ROLLER: KernelGroup → aligned rPrograms, unranked (`construct`) or ranked by the performance model (`rank`)."""

from __future__ import annotations

from roller_svc.construct.rprograms import construct, rank, rank_units

__all__ = ["construct", "rank", "rank_units"]
