"""Transports move payloads between ranks."""

from dyncp.transport.distributed import Distributed
from dyncp.transport.in_process import InProcess
from dyncp.transport.transport import Channel, Null, Transport, TransportError

__all__ = ["Channel", "Distributed", "InProcess", "Null", "Transport", "TransportError"]
