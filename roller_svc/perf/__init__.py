"""The micro performance model: RProgram → Estimate."""

from __future__ import annotations

from roller_svc.perf.banks import bank_padding
from roller_svc.perf.model import Model, estimate, model

__all__ = ["Model", "bank_padding", "estimate", "model"]
