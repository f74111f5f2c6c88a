"""Transports move payloads between ranks."""

from dyncp.transport.distributed import Distributed
from dyncp.transport.transport import Channel, InProcess, Null, Transport, TransportError

__all__ = ["Channel", "Distributed", "InProcess", "Null", "Transport", "TransportError"]
